"""Training samples in Megatron-core's order: the stream `data.order: megatron` trains on.

Same seed, same files, same number of samples asked for: the same samples, in the same places, as its GPTDataset and
BlendedDataset give. How many are asked for decides the epochs and so the whole order, which is why a run in this order
cannot change its length. Each process computes the order alone; nothing waits for rank 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from argosy.data.corpus.corpus import SPLITS, Corpus
from argosy.data.samples.megatron_blend import MegatronBlend, plan_blend
from argosy.data.samples.megatron_order import MegatronSamples, split_ranges
from argosy.data.samples.order import Indices
from argosy.data.samples.windows import Batch, BatchMaker


class MegatronSet:
    """One corpus as one of Megatron's data sets: its sequences in file order, across shards."""

    def __init__(
        self, corpus: Corpus, shares: tuple[float, float, float], split: str, *, seq_len: int, num_samples: int | None,
        seed: int, cache_dir: Path | None,
    ) -> None:  # fmt: skip
        self.corpus = corpus
        lengths = np.concatenate([shard.lengths for shard in corpus.shards])
        first, last = split_ranges(shares, len(lengths))[SPLITS.index(split)]
        ends = np.cumsum(lengths, dtype=np.int64)
        self._starts = (ends - lengths)[first:last]  # where each sequence of the split begins in the corpus
        self.samples = MegatronSamples(
            lengths[first:last], seq_len=seq_len, num_samples=num_samples, seed=seed, cache_dir=cache_dir, name=split
        )
        self.count = len(self.samples)
        if self.samples.cache_problem is not None:
            print(f"note: the order of {corpus.path} could not be kept: {self.samples.cache_problem}", file=sys.stderr)

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """(start, count) in the corpus of what makes up a sample."""
        return [(int(self._starts[sequence]) + offset, count) for sequence, offset, count in self.samples.pieces(index)]

    def read_into(self, row: npt.NDArray[np.int64], index: int) -> None:
        at = 0
        for start, count in self.pieces(index):
            row[at : at + count] = self.corpus.read(start, count)
            at += count


class MegatronStream:
    """As `SampleStream`, but finite: it holds the samples that were asked for."""

    def __init__(
        self,
        corpora: Sequence[Corpus],
        shares: tuple[float, float, float],
        weights: Sequence[float] | None,
        *,
        seq_len: int,
        num_samples: int,
        seed: int,
        maker: BatchMaker,
        cache_dir: Path | None = None,
    ) -> None:
        self.seq_len, self._maker = seq_len, maker
        plan = plan_blend(weights, num_samples) if weights is not None else None
        alone = len(corpora) == 1 and plan is None
        asked: list[int | None] = (
            list(plan.num_samples) if plan is not None else [num_samples if alone else None] * len(corpora)
        )
        self.sets = [
            MegatronSet(corpus, shares, "train", seq_len=seq_len, num_samples=n, seed=seed, cache_dir=cache_dir)
            for corpus, n in zip(corpora, asked, strict=True)
        ]
        counts = [len(s.samples) for s in self.sets]
        if plan is not None:
            self._blend: MegatronBlend | None = MegatronBlend(plan.weights, plan.size)
            self._blend.refuse_oversampling(counts)
        else:
            self._blend = None if alone else MegatronBlend(counts, min(num_samples, sum(counts)))

    @property
    def epoch_samples(self) -> int:
        return sum((s.samples.tokens - 1) // self.seq_len for s in self.sets)

    def batch(self, first: int, count: int) -> Batch:
        corpus, local = self.locate(np.arange(first, first + count, dtype=np.int64))
        rows = np.empty((count, self.seq_len + 1), np.int64)
        for row, c, index in zip(rows, corpus, local, strict=True):
            self.sets[c].read_into(row, int(index))
        return self._maker.batch(
            rows, first, lambda row: f"sample {int(local[row])} of {self.sets[corpus[row]].corpus.path}"
        )

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """(corpus, Megatron's sample number in it) of each sample index."""
        if self._blend is None:
            return np.zeros(len(indices), np.int64), indices
        return self._blend.locate(indices)

    def prefetch(self, first: int, count: int) -> None:
        if not any(s.corpus.is_remote for s in self.sets):
            return
        corpus, local = self.locate(np.arange(first, first + count, dtype=np.int64))
        for c, s in enumerate(self.sets):
            s.corpus.prefetch([piece for index in local[corpus == c] for piece in s.pieces(int(index))])

    def epochs_after(self, samples: int) -> list[float]:
        given = [samples] if self._blend is None else self._blend.counts(min(samples, len(self._blend))).tolist()
        return [n * self.seq_len / s.samples.tokens for n, s in zip(given, self.sets, strict=True)]

"""Sample streams in Megatron-core's order, for training and evaluation with `data.order: megatron`.

With the same seed, files and number of samples, the samples and their order equal those of Megatron's GPTDataset and
BlendedDataset. The number of samples determines the number of epochs and so the whole order, so a run in this order cannot
change its length. Evaluation uses one epoch. Every process computes the order by itself; no rank waits for rank 0.

All splits are cut by sequence, as in Megatron. If documents have several sequences, one document can lie in two splits, but no
token does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from argosy.data.corpus.corpus import SPLITS, Corpus, Split
from argosy.data.samples.megatron_blend import MegatronBlend, plan_blend
from argosy.data.samples.megatron_order import MegatronSamples, split_ranges
from argosy.data.samples.order import Indices
from argosy.data.samples.windows import Batch, Maker
from argosy.errors import ArgosyError

_log = logging.getLogger(__name__)


def split_by_sequence(corpus: Corpus, shares: Sequence[float]) -> dict[str, Split]:
    """Return the splits of a corpus as Megatron cuts them. `first` and `last` of each split count sequences."""
    lengths = np.concatenate([shard.lengths for shard in corpus.shards])
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ranges = zip(SPLITS, split_ranges(shares, len(lengths)), strict=True)
    return {name: Split(name, first, last, int(starts[first]), int(starts[last])) for name, (first, last) in ranges}


class MegatronSet:
    """One corpus as a Megatron GPTDataset: its sequences in file order, across shards."""

    def __init__(
        self, corpus: Corpus, split: Split, *, seq_len: int, num_samples: int | None, seed: int, cache_dir: Path | None
    ) -> None:
        self.corpus = corpus
        lengths = np.concatenate([shard.lengths for shard in corpus.shards])[split.first : split.last]
        # The first token of each sequence of the split, counted in the corpus.
        self._starts = split.start + np.cumsum(lengths, dtype=np.int64) - lengths
        self.samples = MegatronSamples(
            lengths,
            seq_len=seq_len,
            num_samples=num_samples,
            seed=seed,
            cache_dir=cache_dir,
            name=split.name,
            where=str(corpus.path),
        )
        self.count = len(self.samples)
        if self.samples.cache_problem is not None:
            problem = self.samples.cache_problem
            _log.info("the sample order of %s could not be cached: %s", corpus.path, problem)

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """Return the token ranges (start, count) in the corpus that make up a sample."""
        return [(int(self._starts[sequence]) + offset, count) for sequence, offset, count in self.samples.pieces(index)]

    def read_into(self, row: npt.NDArray[np.int64], index: int) -> None:
        """Read sample `index` into `row` [seq_len + 1]."""
        at = 0
        for start, count in self.pieces(index):
            row[at : at + count] = self.corpus.read(start, count)
            at += count


class MegatronStream:
    """A finite stream of samples in Megatron's order: `num_samples` samples, or one epoch of each corpus if that is None."""

    def __init__(
        self,
        corpora: Sequence[Corpus],
        shares: tuple[float, float, float],
        weights: Sequence[float] | None,
        *,
        seq_len: int,
        num_samples: int | None,
        seed: int,
        maker: Maker,
        split: str = "train",
        cache_dir: Path | None = None,
    ) -> None:
        self.seq_len, self._maker = seq_len, maker
        plan = plan_blend(weights, num_samples) if weights is not None and num_samples is not None else None
        alone = len(corpora) == 1 and plan is None
        asked: list[int | None] = (
            list(plan.num_samples) if plan is not None else [num_samples if alone else None] * len(corpora)
        )
        self.sets = [
            MegatronSet(
                corpus, split_by_sequence(corpus, shares)[split], seq_len=seq_len, num_samples=n, seed=seed, cache_dir=cache_dir
            )
            for corpus, n in zip(corpora, asked, strict=True)
        ]  # fmt: skip
        counts = [s.count for s in self.sets]
        self._blend: MegatronBlend | None = None
        if plan is not None:
            self._blend = MegatronBlend(plan.weights, plan.size)
            self._blend.refuse_oversampling(counts)
        elif not alone:
            self._blend = MegatronBlend(counts, None if num_samples is None else min(num_samples, sum(counts)))
        if num_samples is not None and len(self) < num_samples:
            raise _too_short(counts, len(self), num_samples)

    def __len__(self) -> int:
        return self.sets[0].count if self._blend is None else len(self._blend)

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
        """Return (corpus, Megatron's sample number in that corpus) of each sample index.

        Past the end the stream starts over: a run that skipped samples after a rewind needs more samples than Megatron built.
        """
        indices = indices % len(self)
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


def _too_short(counts: Sequence[int], blended: int, asked: int) -> ArgosyError:
    """Return the error for a run that needs more samples than an unweighted Megatron blend has.

    Without weights Megatron builds one epoch of each set, and its own run would end early, out of data.
    """
    sizes = " + ".join(f"{count:,}" for count in counts)
    weights = ", ".join(str(count) for count in counts)
    return ArgosyError(
        "config.arithmetic",
        f"the run takes {asked:,} samples; without weights Megatron's blend gives every sample once: {sizes} = {blended:,}",
        key="data.train",
        fix=f"give every corpus a weight, such as its number of samples for the same shares ({weights}): Megatron then repeats them; or train "
        f"for {blended:,} samples or fewer, or with data.order=argosy",
    )

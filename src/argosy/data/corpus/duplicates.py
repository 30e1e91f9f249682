"""Estimate the fraction of duplicate documents in a corpus from a sample.

A plain sample of documents misses nearly every duplicate: with 20,000 of 10 million documents, a document and its one copy
are both drawn with a probability of four in a million. But duplicates have the same length, and lengths are known from the
`.idx` without reading a token. So lengths are sampled instead: every document of a drawn length is hashed, and a group of
duplicates is in the sample completely or not at all. That makes the fraction an unbiased estimate. Lengths so common that
they would fill the sample (fixed-size chunks, one page repeated a million times) are sampled document by document instead.
Only much-repeated documents are detected there; the estimate is then a lower bound and says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from argosy.data.corpus.corpus import Corpus
from argosy.data.corpus.lengths import Integers, LengthCounts, document_lengths

# A length whose documents exceed 1/8 of the sample is too common to be hashed completely.
_COMMON = 8
# The limit of tokens read for hashing.
_HASHED_BYTES = 1 << 33
_READ_TOKENS = 1 << 22


@dataclass(frozen=True)
class Duplicates:
    """The estimate."""

    # Documents that were hashed.
    sampled: int
    # Documents of the corpus that have tokens.
    documents: int
    # Documents of the sample that repeat an earlier one.
    copies: int
    # The estimated fraction of duplicates in the corpus.
    share: float
    lower_bound: bool

    def describe(self) -> str:
        if self.sampled == self.documents:
            return f"{self.copies:,} of {self.documents:,} documents repeat an earlier one ({self.share:.2%})"
        bound = "at least " if self.lower_bound else ""
        return (
            f"{bound}{self.share:.2%} of the documents repeat another, estimated from {self.sampled:,} of "
            f"{self.documents:,} ({self.copies:,} copies among them)"
        )


def estimate_duplicates(corpus: Corpus, counts: LengthCounts, *, sample: int, seed: int = 0) -> Duplicates:
    """Estimate the fraction of duplicates by hashing about `sample` documents, at most 8 GiB of tokens."""
    filled = counts.lengths > 0
    lengths, often = counts.lengths[filled], counts.documents[filled]
    documents = int(often.sum())
    if documents == 0:
        return Duplicates(0, 0, 0, 0.0, lower_bound=False)
    size = corpus.shards[0].dtype.itemsize
    sample = max(1, min(sample, _HASHED_BYTES * documents // max(1, int(lengths @ often) * size)))
    generator = np.random.default_rng(seed)
    if documents <= sample:
        whole, common, chance = lengths, np.zeros(0, np.int64), 0.0
        of_rare = documents
    else:
        rare = often <= max(2, sample // _COMMON)
        of_rare, of_common = int(often[rare].sum()), int(often[~rare].sum())
        whole = _draw_lengths(lengths[rare], often[rare], round(sample * of_rare / documents), generator)
        common, chance = lengths[~rare], sample * of_common / documents / max(1, of_common)
    whole_seen, whole_copies = _count_copies(corpus, whole, 1.0, generator)
    common_seen, common_copies = _count_copies(corpus, common, chance, generator)
    share = whole_copies / max(1, whole_seen) * of_rare + common_copies / max(1, common_seen) * (documents - of_rare)
    return Duplicates(
        sampled=whole_seen + common_seen,
        documents=documents,
        copies=whole_copies + common_copies,
        share=share / documents,
        lower_bound=len(common) > 0,
    )


def _draw_lengths(lengths: Integers, often: Integers, budget: int, generator: np.random.Generator) -> Integers:
    """Draw lengths at random until their documents fill the budget; at least one."""
    order = generator.permutation(len(lengths))
    taken = int(np.searchsorted(np.cumsum(often[order]), budget, side="right"))
    return np.sort(lengths[order[: max(1, taken)]])


def _count_copies(corpus: Corpus, lengths: Integers, chance: float, generator: np.random.Generator) -> tuple[int, int]:
    """Hash documents of these lengths, each with probability `chance`. Return (documents hashed, duplicates among them)."""
    seen: set[bytes] = set()
    hashed = 0
    for start, length in _documents_of(corpus, lengths, chance, generator):
        hashed += 1
        seen.add(_hash(corpus, start, length))
    return hashed, hashed - len(seen)


def _documents_of(
    corpus: Corpus, lengths: Integers, chance: float, generator: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """Yield (first token in the corpus, number of tokens) of each chosen document, in file order."""
    if not len(lengths):
        return
    base = 0
    for shard in corpus.shards:
        at = base
        for _, block in document_lengths(shard):
            starts = at + np.cumsum(block) - block
            chosen = np.isin(block, lengths)
            if chance < 1:
                chosen &= generator.random(len(block)) < chance
            yield from zip(starts[chosen].tolist(), block[chosen].tolist(), strict=True)
            at += int(block.sum())
        base += shard.tokens


def _hash(corpus: Corpus, start: int, length: int) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for at in range(start, start + length, _READ_TOKENS):
        digest.update(corpus.read(at, min(_READ_TOKENS, start + length - at)).tobytes())
    return digest.digest()

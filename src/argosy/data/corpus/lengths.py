"""Exact document length statistics in little memory.

The lengths come from the `.idx` alone, a block of documents at a time, and are stored as (length, count): a corpus of T
tokens has at most sqrt(2T) distinct lengths, so even 5 trillion tokens need some 50 MB, and percentiles are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from argosy.data.corpus.indexed import IndexedReader

Integers = npt.NDArray[np.int64]

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
_BLOCK_DOCUMENTS = 1 << 18
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class Bin:
    """A histogram bin: the number of documents with `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int


@dataclass(frozen=True)
class LengthCounts:
    """The distinct lengths in ascending order, and the number of documents of each length."""

    lengths: Integers
    documents: Integers

    @property
    def total(self) -> int:
        return int(self.documents.sum())

    @property
    def mean(self) -> float:
        return float(self.lengths @ self.documents) / self.total if self.total else 0.0

    def percentile(self, percent: float) -> int:
        """Return the smallest length that at least `percent` percent of the documents do not exceed."""
        if not self.total:
            return 0
        at = np.searchsorted(np.cumsum(self.documents), percent / 100 * self.total)
        return int(self.lengths[min(int(at), len(self.lengths) - 1)])

    def histogram(self) -> list[Bin]:
        """Return bins of doubling width from the shortest document to the longest. Empty documents have their own bin."""
        if not self.total:
            return []
        exponents = np.array([int(length).bit_length() for length in self.lengths])
        bins = []
        for exponent in range(int(exponents[0]), int(exponents[-1]) + 1):
            low, high = (1 << exponent) >> 1, (1 << exponent) - 1
            bins.append(Bin(low, high, int(self.documents[exponents == exponent].sum())))
        return bins


def document_lengths(shard: IndexedReader) -> Iterator[tuple[int, Integers]]:
    """Yield blocks of (number of the first document, tokens of each document)."""
    for first in range(0, shard.documents, _BLOCK_DOCUMENTS):
        bounds = shard.document_indices[first : first + _BLOCK_DOCUMENTS + 1].astype(np.int64)
        sequences = shard.lengths[int(bounds[0]) : int(bounds[-1])]
        ends = np.concatenate(([0], np.cumsum(sequences, dtype=np.int64)))
        yield first, np.diff(ends[bounds - bounds[0]])


def count_lengths(shards: Sequence[IndexedReader]) -> LengthCounts:
    """Count the document lengths of all shards."""
    return _sum_up(lengths for shard in shards for _, lengths in document_lengths(shard))


def _sum_up(blocks: Iterable[Integers]) -> LengthCounts:
    lengths, documents = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for block in blocks:
        found, often = np.unique(block, return_counts=True)
        together, place = np.unique(np.concatenate((lengths, found)), return_inverse=True)
        counts = np.zeros(len(together), np.int64)
        np.add.at(counts, place, np.concatenate((documents, often)))
        lengths, documents = together, counts
    return LengthCounts(lengths, documents)


def draw(bins: Sequence[Bin], *, width: int = 40) -> str:
    """Draw the histogram as horizontal bars with a resolution of an eighth of a character."""
    if not bins:
        return "(no documents)"
    most, total = max(bin.documents for bin in bins) or 1, sum(bin.documents for bin in bins) or 1
    edge = len(f"{bins[-1].high:,}")
    lines = []
    for bin in bins:
        label = f"{bin.low:>{edge},}" + (f" – {bin.high:>{edge},}" if bin.high != bin.low else " " * (edge + 3))
        lines.append(
            f"{label} │{_bar(bin.documents / most, width):<{width}} {bin.documents:,} ({bin.documents / total:.1%})"
        )
    return "\n".join(lines)


def _bar(share: float, width: int) -> str:
    eighths = round(share * width * 8)
    # A bin that is not empty is always visible.
    if share > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()

"""Near-duplicates by MinHash and banding (Broder 1997), confirmed by a sketch of the n-grams.

A document is its set of n-grams of folded words. `bands` x `rows` MinHash values make `bands` keys; documents that share one are
candidates. With 20 bands of 6 rows a pair of similarity 0.8 shares a key with a probability of 99.8%, one of 0.5 with 27%. Candidates are
then compared by the smallest hashes of their n-grams, which is exact for documents of up to `sketch` n-grams.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import numpy.typing as npt
from pydantic import Field

from argosy.data.curate.document_marks import ComparingStep, Marks
from argosy.data.curate.text_batch import TextBatch
from argosy.data.curate.word_sequence import Hashes, mix, running_sums

_ODD = np.uint64(0x9E3779B97F4A7C15)


class Step(ComparingStep):
    """Keep the first of all documents that are connected by pairs of at least `threshold` similarity."""

    n: int = Field(default=5, ge=1)
    # The Jaccard similarity of two sets of n-grams from which they are duplicates.
    threshold: float = Field(default=0.8, gt=0, le=1)
    bands: int = Field(default=20, ge=1, le=256)
    rows: int = Field(default=6, ge=1, le=64)
    # The largest number of n-grams kept of a document, 4 bytes each.
    sketch: int = Field(default=1024, ge=64, le=65536)

    @property
    def similarity(self) -> float:
        return self.threshold

    @property
    def sketch_size(self) -> int:
        return self.sketch

    @property
    def tables(self) -> int:
        return self.bands

    def mark(self, batch: TextBatch) -> Marks:
        words, alive = batch.folded_words, batch.alive
        starts = words.gram_starts(self.n, alive)
        hashes = (mix(words.grams(self.n, starts)) >> np.uint64(32)).astype(np.uint32)
        sizes = np.maximum(words.per_document[alive] - self.n + 1, 0)
        keys = np.zeros((self.bands, len(sizes)), np.uint64)
        filled = sizes > 0
        if filled.any():
            keys[:, filled] = self._keys(hashes, (np.cumsum(sizes) - sizes)[filled])
        return Marks(keys, *smallest(hashes, sizes, self.sketch))

    def _keys(self, hashes: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64]) -> Hashes:
        """Return the keys of each band for documents whose n-grams start at `starts`."""
        permuted = np.empty_like(hashes)
        minima = np.empty((self.bands * self.rows, len(starts)), np.uint32)
        for multiplier, least in zip(_multipliers(len(minima)), minima, strict=True):
            # Multiplication by an odd number permutes the integers of 32 bits.
            np.multiply(hashes, multiplier, out=permuted)
            np.minimum.reduceat(permuted, starts, out=least)
        keys = np.repeat(np.arange(1, self.bands + 1, dtype=np.uint64)[:, None], len(starts), axis=1)
        for row in range(self.rows):
            keys *= _ODD
            keys += minima[row :: self.rows]
        return np.maximum(mix(keys), np.uint64(1))


@cache
def _multipliers(count: int) -> npt.NDArray[np.uint32]:
    """Return odd integers, the same ones in every process."""
    values: npt.NDArray[np.uint32] = (mix(np.arange(1, count + 1, dtype=np.uint64)) >> np.uint64(32)).astype(np.uint32)
    return values | np.uint32(1)


def smallest(
    hashes: npt.NDArray[np.uint32], sizes: npt.NDArray[np.int64], most: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """Return the `most` smallest different hashes of each document: their numbers, and the hashes back to back."""
    ordered, bounds = hashes.copy(), running_sums(sizes)
    for first, end in itertools.pairwise(bounds.tolist()):
        ordered[first:end].sort()
    distinct = np.ones(len(ordered), np.bool_)
    distinct[1:] = ordered[1:] != ordered[:-1]
    distinct[bounds[:-1][sizes > 0]] = True
    ranks = running_sums(distinct, np.int64)
    counts = np.diff(ranks[bounds])
    if (counts > most).any():
        distinct &= ranks[:-1] - np.repeat(ranks[bounds[:-1]], sizes) < most
    return np.minimum(counts, most), ordered[distinct]

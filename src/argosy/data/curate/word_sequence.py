"""The words of a batch of documents, with the hashes of their n-grams.

Hashes come from prefix sums of a polynomial with wrap-around in 64 bits, so an n-gram of any length costs two operations on arrays.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]

# Odd, so that each has an inverse modulo 2**64: the bases of the polynomials over characters and over words.
BASE, _WORD_BASE = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
_powers: dict[int, Hashes] = {}
# The longest table that is kept.
_KEPT = 1 << 21


def powers(base: int, count: int) -> Hashes:
    """Return base**0 … base**(count - 1) modulo 2**64. The table grows in powers of two; a very long one is not kept."""
    table = _powers.get(base)
    if table is None or len(table) < count:
        table = np.full(max(1 << 18, 1 << (count - 1).bit_length()) if count <= _KEPT else count, base, np.uint64)
        table[0] = 1
        table = np.cumprod(table, dtype=np.uint64)
        if count <= _KEPT:
            _powers[base] = table
    return table[:count]


def inverse_powers(base: int, count: int) -> Hashes:
    """Return the inverses of `powers(base, count)`."""
    return powers(pow(base, -1, 1 << 64), count)


def mix(values: Hashes) -> Hashes:
    """Return well-distributed hashes (the finaliser of splitmix64)."""
    mixed: Hashes = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


class WordSequence:
    """The words of all documents of a batch, in order.

    Args:
        hashes: The hash of each word: a polynomial over its characters.
        lengths: The number of characters of each word.
        per_document: The number of words of each document.
    """

    def __init__(self, hashes: Hashes, lengths: Integers, per_document: Integers) -> None:
        self.hashes, self.lengths, self.per_document = hashes, lengths, per_document
        # The first word of each document, and the end.
        self.firsts = running_sums(per_document)

    @property
    def count(self) -> int:
        return len(self.lengths)

    @cached_property
    def bounds(self) -> Integers:
        """The first character of each word, and the end, if the words are written without spaces."""
        return running_sums(self.lengths)

    @cached_property
    def document_of(self) -> Integers:
        """The document of each word."""
        return np.repeat(np.arange(len(self.per_document)), self.per_document)

    @cached_property
    def document_salts(self) -> Hashes:
        """An odd number for each word, which depends on its document. Hashes times it differ between documents."""
        salts = mix(np.arange(1, len(self.per_document) + 1, dtype=np.uint64)) | np.uint64(1)
        return np.repeat(salts, self.per_document)

    @cached_property
    def _letter_sums(self) -> tuple[Hashes, Hashes]:
        """The prefix sums of the polynomial over the letters of all words written without spaces, and what each is scaled by."""
        count = int(self.bounds[-1]) + 1
        sums = running_sums(self.hashes * powers(BASE, count).take(self.bounds[:-1]))
        return sums, inverse_powers(BASE, count).take(self.bounds[:-1]) * self.document_salts

    @cached_property
    def _word_sums(self) -> tuple[Hashes, Hashes]:
        """The prefix sums of the polynomial over the words, and what each is scaled by."""
        return running_sums(self.hashes * powers(_WORD_BASE, self.count)), inverse_powers(_WORD_BASE, self.count)

    def document_sums(self, values: npt.NDArray[Any]) -> Integers:
        """Return the sum of a value of each word, for each document."""
        sums = np.zeros(len(self.per_document), np.int64)
        filled = self.per_document > 0
        if filled.any():
            sums[filled] = np.add.reduceat(values, self.firsts[:-1][filled], dtype=np.int64)
        return sums

    def longest_grams(self, n: int) -> Integers:
        """Return the number of characters of each document's longest n-gram, spaces included, or more; 0 if it has none."""
        longest = np.zeros(len(self.per_document), np.int64)
        has_gram = self.per_document >= n
        if has_gram.any():
            spans = self.bounds[n:] - self.bounds[:-n]
            # A segment that ends with another document's n-grams is only longer.
            longest[has_gram] = np.maximum.reduceat(spans, self.firsts[:-1][has_gram]) + (n - 1)
        return longest

    def joined_grams(self, n: int, starts: Integers) -> Hashes:
        """Return a hash of words i … i + n - 1 written without spaces, for each start i. Other documents have other hashes."""
        return _spans(*self._letter_sums, n, starts)

    def grams(self, n: int, starts: Integers) -> Hashes:
        """Return a hash of words i … i + n - 1 for each start i."""
        return _spans(*self._word_sums, n, starts)

    def all_grams(self, n: int) -> Hashes:
        """Return the hashes of all n-grams, also of those that begin in one document and end in another."""
        return _all_spans(*self._word_sums, n)

    def gram_starts(self, n: int, documents: npt.NDArray[np.bool_]) -> Integers:
        """Return the first words of the n-grams that lie within one of these documents."""
        counts = np.where(documents, np.maximum(self.per_document - n + 1, 0), 0)
        ends = np.cumsum(counts)
        offsets = self.firsts[:-1] - (ends - counts)
        starts: Integers = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(offsets, counts)
        return starts


def running_sums(values: npt.NDArray[Any], dtype: Any = None) -> npt.NDArray[Any]:
    """Return the sum of the first 0, 1, … and all values."""
    sums = np.zeros(len(values) + 1, dtype or values.dtype)
    np.cumsum(values, out=sums[1:])
    return sums


def _spans(sums: Hashes, scale: Hashes, n: int, starts: Integers) -> Hashes:
    """Return the hashes of n words from each start, from prefix sums."""
    if 4 * len(starts) < len(sums):
        return (sums[starts + n] - sums[starts]) * scale[starts]
    # Neighbours are subtracted faster than they are looked up.
    return _all_spans(sums, scale, n).take(starts)


def _all_spans(sums: Hashes, scale: Hashes, n: int) -> Hashes:
    spans = sums[n:] - sums[:-n]
    spans *= scale[: len(spans)]
    return spans

"""Some hundred documents as arrays, so that every step sees the same words and pays for them once.

The texts of a batch are one array of code points. A word is a run of word characters, or a run of punctuation: what Python's regular
expression `\\w+|[^\\w\\s]+` finds. Hashes of words and n-grams come from prefix sums of a polynomial with wrap-around in 64 bits,
so an n-gram of any length costs two operations on arrays. What a step needs is computed when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.data.curate.characters import LETTER, NOT_SYMBOL, SPACE, WORD, folded, kinds

Hashes = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]

# Odd, so that each has an inverse modulo 2**64: the bases of the polynomials over characters and over words.
_BASE, _WORD_BASE = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
_powers: dict[int, Hashes] = {}


def powers(base: int, count: int) -> Hashes:
    """Return base**0 … base**(count - 1) modulo 2**64. The table grows with the largest request."""
    table = _powers.get(base)
    if table is None or len(table) < count:
        table = np.full(max(count, 1 << 20), base, np.uint64)
        table[0] = 1
        table = _powers[base] = np.cumprod(table, dtype=np.uint64)
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
    """The words of all documents of a batch, in order, and the hashes of their n-grams.

    Args:
        characters: The code points of the batch.
        starts: The first character of each word.
        lengths: The number of characters of each word.
        per_document: The number of words of each document.
    """

    def __init__(
        self, characters: npt.NDArray[Any], starts: Integers, lengths: Integers, per_document: Integers
    ) -> None:
        self.lengths, self.per_document = lengths, per_document
        # The first character of each word, and the end, if the words are written without spaces.
        self.bounds: Integers = np.concatenate(([0], np.cumsum(lengths)))
        # The first word of each document, and the end.
        self.firsts: Integers = np.concatenate(([0], np.cumsum(per_document)))
        sums = np.empty(len(characters) + 1, np.uint64)
        sums[0] = 0
        np.multiply(characters.astype(np.uint64, copy=False), powers(_BASE, len(characters)), out=sums[1:])
        np.cumsum(sums, out=sums)
        # The hash of each word.
        self.hashes: Hashes = (sums[starts + lengths] - sums[starts]) * inverse_powers(_BASE, len(sums))[starts]

    @property
    def count(self) -> int:
        return len(self.lengths)

    @cached_property
    def document_of(self) -> Integers:
        """The document of each word."""
        return np.repeat(np.arange(len(self.per_document)), self.per_document)

    @cached_property
    def document_salts(self) -> Hashes:
        """A hash of each word's document."""
        return np.repeat(mix(np.arange(1, len(self.per_document) + 1, dtype=np.uint64)), self.per_document)

    @cached_property
    def _letter_sums(self) -> tuple[Hashes, Hashes]:
        """The prefix sums of the polynomial over the letters of all words written without spaces, and what each is scaled by."""
        count = int(self.bounds[-1]) + 1
        sums = np.zeros(self.count + 1, np.uint64)
        np.cumsum(self.hashes * powers(_BASE, count)[self.bounds[:-1]], out=sums[1:])
        return sums, inverse_powers(_BASE, count)[self.bounds]

    def document_sums(self, values: npt.NDArray[Any]) -> Integers:
        """Return the sum of a value of each word, for each document."""
        sums: Integers = np.zeros(self.count + 1, np.int64)
        np.cumsum(values, out=sums[1:])
        return np.diff(sums[self.firsts])

    def longest_grams(self, n: int) -> Integers:
        """Return the number of characters of each document's longest n-gram, spaces included, or more; 0 if it has none."""
        longest = np.zeros(len(self.per_document), np.int64)
        has_gram = self.per_document >= n
        if has_gram.any():
            spans = np.zeros(self.count, np.int64)
            spans[: self.count + 1 - n] = self.bounds[n:] - self.bounds[:-n] + n - 1
            # A segment that ends with another document's n-grams is only longer.
            longest[has_gram] = np.maximum.reduceat(spans, self.firsts[:-1][has_gram])
        return longest

    def joined_grams(self, n: int, starts: Integers) -> Hashes:
        """Return a hash of words i … i + n - 1 written without spaces, for each start i."""
        sums, scale = self._letter_sums
        return (sums[starts + n] - sums[starts]) * scale[starts]

    @cached_property
    def _word_sums(self) -> Hashes:
        sums = np.cumsum(self.hashes * powers(_WORD_BASE, self.count), dtype=np.uint64)
        return np.concatenate((np.zeros(1, np.uint64), sums))

    def grams(self, n: int, starts: Integers) -> Hashes:
        """Return a hash of words i … i + n - 1 for each start i."""
        sums = self._word_sums
        return (sums[starts + n] - sums[starts]) * inverse_powers(_WORD_BASE, self.count + 1)[starts]

    def gram_starts(self, n: int, documents: npt.NDArray[np.bool_]) -> Integers:
        """Return the first words of the n-grams that lie within one of these documents."""
        counts = np.where(documents, np.maximum(self.per_document - n + 1, 0), 0)
        ends = np.cumsum(counts)
        offsets = self.firsts[:-1] - (ends - counts)
        starts: Integers = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(offsets, counts)
        return starts


class TextBatch:
    """The documents of a batch. `alive` marks those that no step has removed."""

    def __init__(self, texts: Sequence[str], fields: Sequence[dict[str, Any]] = ()) -> None:
        self.texts = list(texts)
        # The fields of each record besides its text.
        self.fields = fields or [{} for _ in self.texts]
        self.alive = np.ones(len(self.texts), np.bool_)

    def living(self) -> list[int]:
        """Return the numbers of the documents that no step has removed."""
        return [int(number) for number in np.flatnonzero(self.alive)]

    @cached_property
    def _codes(self) -> npt.NDArray[Any]:
        """The code points of all texts. White space between documents ends their last words."""
        joined = "\n".join(self.texts)
        try:
            return np.frombuffer(joined.encode("latin-1"), np.uint8)
        except UnicodeEncodeError:
            return np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)

    def _look_up(self, table: npt.NDArray[Any], small: bytes) -> npt.NDArray[Any]:
        """Return the entry of each character in a table over all code points; `small` is its beginning as bytes."""
        codes = self._codes
        if codes.dtype == np.uint8:
            return np.frombuffer(codes.tobytes().translate(small), np.uint8)
        # The indices of `take` are signed, of the same size.
        found: npt.NDArray[Any] = table.take(codes.view(np.int64))
        return found

    @cached_property
    def _kinds(self) -> npt.NDArray[np.uint8]:
        return self._look_up(kinds(), kinds()[:256].tobytes())

    @cached_property
    def _runs(self) -> tuple[Integers, Integers, npt.NDArray[np.bool_], Integers]:
        """The start and length of each word, whether it is of word characters, and the number of words of each document."""
        group = self._kinds & (SPACE | WORD)
        edges = np.empty(len(group) + 1, np.bool_)
        edges[[0, -1]] = True
        np.not_equal(group[1:], group[:-1], out=edges[1:-1])
        places = np.flatnonzero(edges)
        of_run = group[places[:-1]]
        filled = np.flatnonzero(of_run != SPACE)
        starts = places[filled]
        sizes = np.fromiter(map(len, self.texts), np.int64, len(self.texts)) + 1
        first_words = np.searchsorted(starts, np.cumsum(sizes) - sizes)
        per_document = np.diff(np.concatenate((first_words, [len(starts)])))
        return starts, places[filled + 1] - starts, of_run[filled] == WORD, per_document

    @cached_property
    def words(self) -> WordSequence:
        """The words as they are written, with punctuation."""
        starts, lengths, _, per_document = self._runs
        return WordSequence(self._codes, starts, lengths, per_document)

    @cached_property
    def folded_words(self) -> WordSequence:
        """The words without punctuation, in lower case, without accents, with 0 for every digit."""
        starts, lengths, is_word, per_document = self._runs
        before: Integers = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(is_word, out=before[1:])
        bounds = np.concatenate(([0], np.cumsum(per_document)))
        # The folded forms of the first 256 characters are below 256 too.
        characters = self._look_up(folded(), folded()[:256].astype(np.uint8).tobytes())
        return WordSequence(characters, starts[is_word], lengths[is_word], np.diff(before[bounds]))

    @cached_property
    def word_kinds(self) -> npt.NDArray[np.uint8]:
        """The kinds of all characters of each word, as one set of bits."""
        starts, lengths, _, _ = self._runs
        found = self._kinds[starts] & ~np.uint8(SPACE)
        # Most words begin with a letter, which settles them.
        rest = np.flatnonzero((found != WORD | LETTER | NOT_SYMBOL) & (lengths > 1))
        if len(rest):
            bounds = np.stack((starts[rest], starts[rest] + lengths[rest]), axis=1).ravel()
            # The end of the last word may be the end of the text, where no segment can begin.
            padded = np.concatenate((self._kinds, np.zeros(1, np.uint8)))
            found[rest] = np.bitwise_or.reduceat(padded, bounds)[::2]
        return found

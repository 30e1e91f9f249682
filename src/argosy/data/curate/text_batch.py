"""Some hundred documents as arrays, so that every step sees the same words and pays for them once.

The texts of a batch are one array of code points. A word is a run of word characters, or a run of punctuation: what Python's regular
expression `\\w+|[^\\w\\s]+` finds. What a step needs is computed when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.data.curate.characters import FOLDS, LETTER, NOT_SYMBOL, SPACE, WORD, folded, kinds
from argosy.data.curate.word_sequence import (
    BASE,
    Hashes,
    Integers,
    WordSequence,
    inverse_powers,
    mix,
    powers,
    running_sums,
)


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
    def codes(self) -> npt.NDArray[Any]:
        """The code points of all texts, each with a line feed after it."""
        joined = "\n".join([*self.texts, ""])
        try:
            return np.frombuffer(joined.encode("latin-1"), np.uint8)
        except UnicodeEncodeError:
            return np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4")

    @cached_property
    def offsets(self) -> Integers:
        """The first character of each text, and the end."""
        return running_sums(np.fromiter(map(len, self.texts), np.int64, len(self.texts)) + 1)

    @cached_property
    def kinds(self) -> npt.NDArray[np.uint8]:
        """The kind of each character."""
        codes = self.codes
        latin = np.frombuffer(codes.astype(np.uint8).tobytes().translate(kinds().latin.tobytes()), np.uint8)
        if codes.dtype == np.uint8:
            return latin
        found, others = latin.copy(), np.flatnonzero(codes > 255)
        found[others] = kinds().look_up(codes[others])
        return found

    @cached_property
    def _sums(self) -> Hashes:
        """The prefix sums of the polynomial over all characters."""
        sums = np.zeros(len(self.codes) + 1, np.uint64)
        sums[1:] = self.codes
        sums[1:] *= powers(BASE, len(self.codes))
        np.cumsum(sums, out=sums)
        return sums

    def hashes(self, starts: Integers, ends: Integers) -> Hashes:
        """Return the hash of each piece of text."""
        found = self._sums.take(ends)
        found -= self._sums.take(starts)
        found *= inverse_powers(BASE, len(self._sums)).take(starts)
        return found

    def counts(self, places: Integers) -> Integers:
        """Return how many of these characters, given in order, each document has."""
        return np.diff(np.searchsorted(places, self.offsets))

    @cached_property
    def _runs(self) -> tuple[Integers, Integers]:
        """The start and end of each word."""
        group = self.kinds & (SPACE | WORD)
        filled, differs = group != SPACE, group[1:] != group[:-1]
        begins = filled[:1], differs & filled[1:]
        return np.flatnonzero(np.concatenate(begins)), np.flatnonzero(differs & filled[:-1]) + 1

    @cached_property
    def words(self) -> WordSequence:
        """The words as they are written, with punctuation."""
        starts, ends = self._runs
        return WordSequence(self.hashes(starts, ends), ends - starts, self.counts(starts))

    @cached_property
    def folded_words(self) -> WordSequence:
        """The words without punctuation, in lower case, without accents, with 0 for every digit."""
        starts, _ = self._runs
        hashes = self.words.hashes.copy()
        # Few characters are not their own folded form: those alone change the hashes of their words.
        places = np.flatnonzero((self.kinds & FOLDS) != 0)
        codes = self.codes[places]
        changes = folded().look_up(codes).astype(np.uint64) - codes
        of_word = np.searchsorted(starts, places, side="right") - 1
        np.add.at(hashes, of_word, changes * powers(BASE, len(self.codes)).take(places - starts[of_word]))
        is_word = np.flatnonzero((self.kinds[starts] & WORD) != 0)
        per_document = np.diff(np.searchsorted(is_word, self.words.firsts))
        return WordSequence(hashes.take(is_word), self.words.lengths.take(is_word), per_document)

    @cached_property
    def lines(self) -> tuple[Integers, Integers]:
        """The start and end of each line, between line feeds. The lines of document i are `line_firsts[i]` … `line_firsts[i + 1] - 1`."""
        ends = np.flatnonzero(self.codes == ord("\n"))
        return np.concatenate(([0], ends + 1))[:-1], ends

    @cached_property
    def line_firsts(self) -> Integers:
        """The first line of each document, and the end."""
        return np.searchsorted(self.lines[0], self.offsets)

    @cached_property
    def line_words(self) -> Integers:
        """The number of words of each line."""
        starts, ends = self.lines
        return np.diff(np.searchsorted(self._runs[0], np.concatenate((starts, ends[-1:]))))

    @cached_property
    def repeats_lines(self) -> npt.NDArray[np.bool_]:
        """True for each document in which two lines that are not empty are equal, or their hashes."""
        starts, ends = self.lines
        filled = np.flatnonzero(ends > starts)
        documents = np.repeat(np.arange(len(self.texts)), np.diff(self.line_firsts))[filled]
        salted = self.hashes(starts[filled], ends[filled]) + mix(documents.astype(np.uint64))
        order = np.argsort(salted)
        repeated = np.zeros(len(self.texts), np.bool_)
        repeated[documents[order[1:][np.diff(salted[order]) == 0]]] = True
        return repeated

    @cached_property
    def word_kinds(self) -> npt.NDArray[np.uint8]:
        """The kinds of all characters of each word, as one set of bits. WORD, LETTER and NOT_SYMBOL count, no others."""
        starts, ends = self._runs
        letter = np.uint8(WORD | LETTER | NOT_SYMBOL)
        found = self.kinds[starts] & letter
        # Most words begin with a letter, which settles them.
        rest = np.flatnonzero((found != letter) & (self.words.lengths > 1))
        if len(rest):
            bounds = np.stack((starts[rest], ends[rest]), axis=1).ravel()
            found[rest] = np.bitwise_or.reduceat(self.kinds, bounds)[::2]
        return found

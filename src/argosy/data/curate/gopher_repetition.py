"""The repetition rules of Gopher (Rae et al. 2021, table A1), with the decisions of datatrove's GopherRepetitionFilter.

N-grams of a whole batch are compared at once: the hashes of one length are sorted, and only repeated ones are looked at further.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import field_validator

from argosy.data.curate.characters import SPACE
from argosy.data.curate.curation_step import CurationStep, StepResult
from argosy.data.curate.text_batch import TextBatch
from argosy.data.curate.word_sequence import Hashes, Integers, WordSequence

_PARAGRAPHS = re.compile(r"\n{2,}")
_LINES = re.compile(r"\n+")


Limits = tuple[tuple[int, float], ...]


class Step(CurationStep):
    """Remove documents that repeat lines, paragraphs or n-grams of words. A fraction of 0 disables its rule."""

    dup_line_frac: float = 0.3
    dup_para_frac: float = 0.3
    dup_line_char_frac: float = 0.2
    dup_para_char_frac: float = 0.2
    # (n, largest fraction of the characters in the most frequent n-gram)
    top_n_grams: Limits = ((2, 0.2), (3, 0.18), (4, 0.16))
    # (n, largest fraction of the characters in repeated n-grams)
    dup_n_grams: Limits = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))

    @field_validator("top_n_grams", "dup_n_grams")
    @classmethod
    def _ascending(cls, limits: Limits) -> Limits:
        if any(n < 1 for n, _ in limits) or [n for n, _ in limits] != sorted(n for n, _ in limits):
            raise ValueError("lengths of n-grams are positive and ascend")
        return limits

    def apply(self, batch: TextBatch) -> StepResult:
        result = StepResult()
        # A text repeats a paragraph only if it repeats its lines, except for the white space around the text.
        first, last = batch.kinds.take(batch.offsets[:-1]), batch.kinds.take(batch.offsets[1:] - 2)
        for number in np.flatnonzero(batch.alive & (batch.repeats_lines | ((first | last) & SPACE != 0))):
            reason = self._lines(batch.texts[number])
            if reason is not None:
                result.removed[int(number)] = reason
        candidates = batch.alive.copy()
        candidates[list(result.removed)] = False
        sizes = np.diff(batch.offsets) - 1
        self._judge_top(batch.words, sizes, candidates, result)
        self._judge_repeated(batch.words, sizes, candidates, result)
        return result

    def _judge_top(
        self, words: WordSequence, sizes: Integers, candidates: npt.NDArray[np.bool_], result: StepResult
    ) -> None:
        # The n-gram of a document that occurs most often occurs no more often than the most frequent shorter one.
        counts = _most_occurrences(words, self.top_n_grams[0][0]) if self.top_n_grams else sizes
        for n, fraction in self.top_n_grams:
            possible = candidates & (counts * words.longest_grams(n) > fraction * sizes)
            if not possible.any():
                continue
            characters, here = _top_gram(words, n, possible)
            counts = np.where(possible, here, counts)
            _remove(result, candidates, possible & (characters / np.maximum(sizes, 1) > fraction), f"top_{n}_gram")

    def _judge_repeated(
        self, words: WordSequence, sizes: Integers, candidates: npt.NDArray[np.bool_], result: StepResult
    ) -> None:
        # Repeated n-grams lie within repeated shorter ones, so few documents need a look at the longer ones.
        covered = sizes
        least = min((fraction for _, fraction in self.dup_n_grams), default=0.0)
        for n, fraction in self.dup_n_grams:
            possible = candidates & (covered > least * sizes)
            if not possible.any():
                break
            starts = words.gram_starts(n, possible)
            repeats = Repeats(words, n, starts, words.joined_grams(n, starts))
            covered = np.where(possible, repeats.covered(), covered)
            found = possible & (covered / np.maximum(sizes, 1) > fraction)
            # What repeated n-grams cover is an upper bound. The rule counts them from left to right, without overlap.
            for number in np.flatnonzero(found):
                found[number] = repeats.count_exceeds(int(number), int(sizes[number]), fraction)
            _remove(result, candidates, found, f"duplicated_{n}_n_grams")

    def _lines(self, text: str) -> str | None:
        if not text:
            return "empty"
        stripped = text.strip()
        paragraphs = _PARAGRAPHS.split(stripped) if "\n\n" in stripped else [stripped]
        repeated, characters = find_repeated(paragraphs)
        if self.dup_para_frac and repeated / len(paragraphs) > self.dup_para_frac:
            return "dup_para_frac"
        if self.dup_para_char_frac and characters / len(text) > self.dup_para_char_frac:
            return "dup_para_char_frac"
        lines = _LINES.split(text) if "\n\n" in text else text.split("\n")
        repeated, characters = find_repeated(lines)
        if self.dup_line_frac and repeated / len(lines) > self.dup_line_frac:
            return "dup_line_frac"
        if self.dup_line_char_frac and characters / len(text) > self.dup_line_char_frac:
            return "dup_line_char_frac"
        return None


def find_repeated(parts: Sequence[str]) -> tuple[int, int]:
    """Return how many parts repeat an earlier one, and how many characters they have."""
    seen = set(parts)
    if len(seen) == len(parts):
        return 0, 0
    return len(parts) - len(seen), sum(map(len, parts)) - sum(map(len, seen))


def _remove(result: StepResult, candidates: npt.NDArray[np.bool_], found: npt.NDArray[np.bool_], reason: str) -> None:
    for number in np.flatnonzero(found & candidates):
        result.removed[int(number)] = reason
        candidates[number] = False


class Repeats:
    """The n-grams that occur more than once in their document.

    Args:
        words: The words.
        n: The length of the n-grams.
        starts: The first words of the n-grams to look at.
        hashes: Their hashes, which differ between documents.
    """

    def __init__(self, words: WordSequence, n: int, starts: Integers, hashes: Hashes) -> None:
        self.words, self.n = words, n
        chosen = _sharing(hashes)
        hashes, starts = hashes[chosen], starts[chosen]
        # The number of the n-gram replaces the low bits of its hash, so that one sort of plain integers finds equal hashes with
        # their places. What remains of the hash may collide; the whole hashes of such neighbours are compared.
        room = np.uint64(1 << max(1, len(starts).bit_length()))
        packed = hashes & ~(room - np.uint64(1))
        packed |= np.arange(len(starts), dtype=np.uint64)
        packed.sort()
        places = np.flatnonzero((packed[1:] ^ packed[:-1]) < room)
        before, after = ((packed[at] & (room - np.uint64(1))).astype(np.int64) for at in (places, places + 1))
        equal = hashes[before] == hashes[after]
        before, after, places = before[equal], after[equal], places[equal]
        # A run of equal neighbours is one group. Its first member is the first occurrence, because numbers ascend.
        begins = np.ones(len(places), np.bool_)
        begins[1:] = places[1:] != places[:-1] + 1
        self.group: Integers = np.cumsum(begins) - 1
        # The first word of the first occurrence of each group, and of each later one with its group.
        self.first: Integers = starts[before[begins]]
        self.later: Integers = starts[after]

    @cached_property
    def _ordered(self) -> tuple[Integers, Integers]:
        """The first words of all occurrences in order, and the group of each."""
        places = np.concatenate((self.first, self.later))
        groups = np.concatenate((np.arange(len(self.first)), self.group))
        order = np.argsort(places)
        return places[order], groups[order]

    def covered(self) -> Integers:
        """Return how many characters of each document lie in an n-gram that occurred before."""
        order = np.sort(self.later)
        until = order + self.n
        until[:-1] = np.minimum(until[:-1], order[1:])
        characters = self.words.bounds[until] - self.words.bounds[order]
        documents = self.words.document_of[order]
        return np.bincount(documents, characters, len(self.words.per_document)).astype(np.int64)

    def count_exceeds(self, document: int, size: int, fraction: float) -> bool:
        """Return True if repeated n-grams, counted from left to right without overlap, have more than a fraction of `size` characters."""
        places, groups = self._ordered
        low, high = np.searchsorted(places, self.words.firsts[document : document + 2])
        places, groups = places[low:high], groups[low:high]
        lengths = self.words.bounds[places + self.n] - self.words.bounds[places]
        seen: set[int] = set()
        next_place, characters = 0, 0
        for place, group, length in zip(places.tolist(), groups.tolist(), lengths.tolist(), strict=True):
            if place < next_place:
                continue
            if group in seen:
                characters += length
                if characters / size > fraction:
                    return True
                next_place = place + self.n
            seen.add(group)
        return False


def _sharing(hashes: Hashes) -> Integers:
    """Return the places of all hashes that occur more than once, and of a few others."""
    bits = len(hashes).bit_length() + 2
    slots = (hashes >> np.uint64(64 - bits)).view(np.int64)
    # Small counters stay in the cache. Where one overflows, their sum shows it.
    counts: npt.NDArray[Any] = np.zeros(1 << bits, np.uint8)
    np.add.at(counts, slots, np.uint8(1))
    if counts.sum() != len(hashes):
        counts = np.bincount(slots)
    return np.flatnonzero(counts.take(slots) > 1)


def _most_occurrences(words: WordSequence, n: int) -> Integers:
    """Return how often each document's most frequent n-gram occurs, or more: n-grams in the same one of 1,024 slots count as one."""
    grams = words.all_grams(n)
    slots = (grams * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(54)).view(np.int64)
    slots += words.document_of[: len(grams)] << 10
    documents = len(words.per_document)
    most: Integers = np.bincount(slots, minlength=documents << 10).reshape(documents, 1024).max(axis=1, initial=0)
    return most


def _top_gram(words: WordSequence, n: int, documents: npt.NDArray[np.bool_]) -> tuple[Integers, Integers]:
    """Return the characters, spaces included, of all occurrences of each document's most frequent n-gram, and their number.

    The first n-gram wins at a tie.
    """
    starts = words.gram_starts(n, documents)
    repeats = Repeats(words, n, starts, words.grams(n, starts) * words.document_salts[starts])
    counts = (
        np.bincount(repeats.group, minlength=len(repeats.first)) + 1 if len(repeats.group) else np.zeros(0, np.int64)
    )
    top = np.zeros(len(documents), np.int64)
    has_gram = documents & (words.per_document >= n)
    # Without a repeated n-gram the first one is the most frequent, once.
    place, often = words.firsts[:-1].copy(), has_gram.astype(np.int64)
    order = np.lexsort((-repeats.first, counts))
    of_group = words.document_of[repeats.first[order]]
    # The last assignment to a document wins: its largest count, at the smallest place.
    place[of_group], often[of_group] = repeats.first[order], counts[order]
    at = place[has_gram]
    top[has_gram] = (words.bounds[at + n] - words.bounds[at] + n - 1) * often[has_gram]
    return top, often

"""The quality rules of Gopher (Rae et al. 2021), with the decisions of datatrove's GopherQualityFilter."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from argosy.data.curate.characters import LETTER, MARK, NOT_SYMBOL, SPACE
from argosy.data.curate.curation_step import CurationStep, StepResult
from argosy.data.curate.text_batch import TextBatch
from argosy.data.curate.word_sequence import Hashes, Integers

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
_SCREEN_BITS = 12
_SCREEN_SHIFT = np.uint64(64 - _SCREEN_BITS)


class Step(CurationStep):
    """Remove documents whose words, symbols or lines are not those of prose. A limit of 0 disables its rule."""

    min_doc_words: int = 50
    max_doc_words: int = 100_000
    min_avg_word_length: float = 3
    max_avg_word_length: float = 10
    # Hashes, or ellipses, for each word.
    max_symbol_word_ratio: float = 0.1
    max_bullet_lines_ratio: float = 0.9
    max_ellipsis_lines_ratio: float = 0.3
    min_alpha_words_ratio: float = 0.8
    # How many different stop words a text must have.
    min_stop_words: int = 2
    stop_words: tuple[str, ...] = STOP_WORDS

    def apply(self, batch: TextBatch) -> StepResult:
        words, kinds = batch.words, batch.word_kinds
        real = (kinds & NOT_SYMBOL) != 0
        facts = (
            words.per_document,
            words.document_sums(real),
            words.document_sums(words.lengths * real),
            words.document_sums((kinds & LETTER) != 0),
            self._stop_words(batch) if self.min_stop_words else words.per_document,
            *_marks(batch),
        )
        result = StepResult()
        columns = np.stack(facts, axis=1).tolist()
        for number in batch.living():
            reason = self._reason(batch.texts[number], *columns[number])
            if reason is not None:
                result.removed[number] = reason
        return result

    def _stop_words(self, batch: TextBatch) -> Integers:
        """Return how many different stop words each document has."""
        stops, screen = _stop_hashes(self.stop_words)
        words = batch.words
        # Nearly all other words are ruled out by one look into a table of bits.
        places = np.flatnonzero(screen.take((words.hashes >> _SCREEN_SHIFT).view(np.int64)))
        hashes, documents = words.hashes[places], words.document_of[places]
        found = np.zeros((len(batch.texts), len(stops)), np.bool_)
        for number, stop in enumerate(stops):
            found[documents[hashes == stop], number] = True
        counts: Integers = found.sum(axis=1)
        return counts

    def _reason(
        self,
        text: str,
        words: int,
        real_words: int,
        characters: int,
        with_letter: int,
        stops: int,
        hashes: int,
        most_dots: int,
        most_bullets: int,
        breaks: int,
    ) -> str | None:
        if self.min_doc_words and real_words < self.min_doc_words:
            return "gopher_short_doc"
        if self.max_doc_words and real_words > self.max_doc_words:
            return "gopher_long_doc"
        mean_length = characters / max(1, real_words)
        if self.min_avg_word_length and mean_length < self.min_avg_word_length:
            return "gopher_below_avg_threshold"
        if self.max_avg_word_length and mean_length > self.max_avg_word_length:
            return "gopher_above_avg_threshold"
        dots = text.count("...") + text.count("…") if most_dots else 0
        if self.max_symbol_word_ratio and hashes / max(1, words) > self.max_symbol_word_ratio:
            return "gopher_too_many_hashes"
        if self.max_symbol_word_ratio and dots / max(1, words) > self.max_symbol_word_ratio:
            return "gopher_too_many_ellipsis"
        reason = self._line_reason(text, dots, most_bullets, breaks)
        if reason is not None:
            return reason
        if self.min_alpha_words_ratio and with_letter / max(1, words) < self.min_alpha_words_ratio:
            return "gopher_below_alpha_threshold"
        if self.min_stop_words and stops < self.min_stop_words:
            return "gopher_enough_stop_words"
        return None

    def _line_reason(self, text: str, dots: int, most_bullets: int, breaks: int) -> str | None:
        # Other characters than a line feed break lines too, so there are at least as many lines as line feeds.
        least, most = max(1, breaks), self.max_bullet_lines_ratio
        if most and most_bullets / least > most:
            lines = text.splitlines()
            bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
            if bullets / len(lines) > most:
                return "gopher_too_many_bullets"
        most = self.max_ellipsis_lines_ratio
        if most and dots / least > most:
            lines = text.splitlines()
            ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines)
            if ellipses / len(lines) > most:
                return "gopher_too_many_end_ellipsis"
        return None


@cache
def _stop_hashes(stop_words: tuple[str, ...]) -> tuple[Hashes, npt.NDArray[np.bool_]]:
    """Return the hashes of stop words, and a table of their highest bits."""
    # One text for each stop word, so that their hashes are made as those of a batch.
    hashes = np.unique(TextBatch(stop_words).words.hashes)
    screen = np.zeros(1 << _SCREEN_BITS, np.bool_)
    screen[hashes >> _SCREEN_SHIFT] = True
    return hashes, screen


def _marks(batch: TextBatch) -> tuple[Integers, ...]:
    """Return the hash signs of each document, its ellipses and lines with a bullet or more than that, and its line feeds."""
    places = np.flatnonzero((batch.kinds & MARK) != 0)
    codes = batch.codes[places]
    dots = places[codes == ord(".")]
    dots = dots[:-2][dots[2:] - dots[:-2] == 2]
    bullets = places[(codes == ord("-")) | (codes == ord("•"))]
    # The character before the first one is the last, a line feed.
    bullets = bullets[batch.kinds[bullets - 1] & SPACE != 0]
    return (
        batch.counts(places[codes == ord("#")]),
        batch.counts(dots) + batch.counts(places[codes == ord("…")]),
        batch.counts(bullets),
        np.diff(batch.line_firsts) - 1,
    )

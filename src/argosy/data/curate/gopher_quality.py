"""The quality rules of Gopher (Rae et al. 2021), with the decisions of datatrove's GopherQualityFilter."""

from __future__ import annotations

import numpy as np

from argosy.data.curate.characters import LETTER, NOT_SYMBOL
from argosy.data.curate.curation_step import CurationStep, StepResult
from argosy.data.curate.text_batch import TextBatch
from argosy.data.curate.word_sequence import Integers

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")


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
        words, kinds, count = batch.words, batch.word_kinds, len(batch.texts)
        real = (kinds & NOT_SYMBOL) != 0
        with_letter = words.document_sums((kinds & LETTER) != 0)
        real_words = words.document_sums(real)
        characters = words.document_sums(words.lengths * real)
        stops = self._stop_words(batch) if self.min_stop_words else np.zeros(count, np.int64)
        facts = np.stack((words.per_document, real_words, characters, with_letter, stops), axis=1).tolist()
        result = StepResult()
        for number in batch.living():
            reason = self._reason(batch.texts[number], *facts[number])
            if reason is not None:
                result.removed[number] = reason
        return result

    def _stop_words(self, batch: TextBatch) -> Integers:
        """Return how many different stop words each document has."""
        found = np.zeros(len(batch.texts), np.int64)
        # One text for each stop word, so that their hashes are made as those of the batch.
        for stop in set(TextBatch(self.stop_words).words.hashes.tolist()):
            documents = batch.words.document_of[batch.words.hashes == np.uint64(stop)]
            found += np.bincount(documents, minlength=len(found)) > 0
        return found

    def _reason(
        self, text: str, words: int, real_words: int, characters: int, with_letter: int, stops: int
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
        dots = text.count("...") + text.count("…")
        if self.max_symbol_word_ratio and text.count("#") / max(1, words) > self.max_symbol_word_ratio:
            return "gopher_too_many_hashes"
        if self.max_symbol_word_ratio and dots / max(1, words) > self.max_symbol_word_ratio:
            return "gopher_too_many_ellipsis"
        reason = self._line_reason(text, dots)
        if reason is not None:
            return reason
        if self.min_alpha_words_ratio and with_letter / max(1, words) < self.min_alpha_words_ratio:
            return "gopher_below_alpha_threshold"
        if self.min_stop_words and stops < self.min_stop_words:
            return "gopher_enough_stop_words"
        return None

    def _line_reason(self, text: str, dots: int) -> str | None:
        lines = text.splitlines()
        most = self.max_bullet_lines_ratio
        # A line with a bullet has at least one such character: most texts have too few to look at their lines.
        if most and (text.count("•") + text.count("-")) / max(1, len(lines)) > most:
            bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
            if bullets / len(lines) > most:
                return "gopher_too_many_bullets"
        most = self.max_ellipsis_lines_ratio
        if most and dots / max(1, len(lines)) > most:
            ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines)
            if ellipses / len(lines) > most:
                return "gopher_too_many_end_ellipsis"
        return None

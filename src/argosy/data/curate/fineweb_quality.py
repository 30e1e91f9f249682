"""The quality rules of FineWeb (Penedo et al. 2024), with the decisions of datatrove's FineWebQualityFilter."""

from __future__ import annotations

from argosy.data.curate.characters import TERMINAL_PUNCTUATION
from argosy.data.curate.curation_step import CurationStep, StepResult
from argosy.data.curate.gopher_repetition import find_repeated
from argosy.data.curate.text_batch import TextBatch


class Step(CurationStep):
    """Remove documents whose lines are mostly without an end mark, short, repeated, or a list."""

    line_punct_thr: float = 0.12
    line_punct_exclude_zero: bool = False
    short_line_thr: float = 0.67
    # characters
    short_line_length: int = 30
    char_duplicates_ratio: float = 0.01
    # Line breaks for each word.
    new_line_ratio: float = 0.3

    def apply(self, batch: TextBatch) -> StepResult:
        words = batch.words.per_document
        result = StepResult()
        for number in batch.living():
            reason = self._reason(batch.texts[number], int(words[number]))
            if reason is not None:
                result.removed[number] = reason
        return result

    def _reason(self, text: str, words: int) -> str | None:
        lines = [line for line in text.split("\n") if line and not line.isspace()]
        if not lines:
            return "empty"
        ended = sum([line[-1] in TERMINAL_PUNCTUATION for line in lines]) / len(lines)
        if ended < self.line_punct_thr and not (ended == 0 and self.line_punct_exclude_zero):
            return "line_punct_ratio"
        if sum([len(line) <= self.short_line_length for line in lines]) / len(lines) > self.short_line_thr:
            return "short_line_ratio"
        breaks = text.count("\n")
        if find_repeated(lines)[1] / (len(text) - breaks) > self.char_duplicates_ratio:
            return "char_dup_ratio"
        if breaks / words > self.new_line_ratio:
            return "list_ratio"
        return None

"""The quality rules of FineWeb (Penedo et al. 2024), with the decisions of datatrove's FineWebQualityFilter."""

from __future__ import annotations

import numpy as np

from argosy.data.curate.characters import TERMINAL
from argosy.data.curate.curation_step import CurationStep, StepResult
from argosy.data.curate.gopher_repetition import find_repeated
from argosy.data.curate.text_batch import TextBatch
from argosy.data.curate.word_sequence import running_sums


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
        starts, ends = batch.lines
        filled = batch.line_words > 0
        starts, ends = starts[filled], ends[filled]
        firsts = np.searchsorted(starts, batch.offsets)
        ended = (batch.kinds[ends - 1] & TERMINAL) != 0
        facts = (
            np.diff(firsts),
            np.diff(running_sums(ended, np.int64)[firsts]),
            np.diff(running_sums(ends - starts <= self.short_line_length, np.int64)[firsts]),
            batch.repeats_lines,
            np.diff(batch.line_firsts) - 1,
            batch.words.per_document,
        )
        columns = np.stack(facts, axis=1).tolist()
        result = StepResult()
        for number in batch.living():
            reason = self._reason(batch.texts[number], *columns[number])
            if reason is not None:
                result.removed[number] = reason
        return result

    def _reason(
        self, text: str, lines: int, ended: int, short: int, repeats: int, breaks: int, words: int
    ) -> str | None:
        """Return the reason to remove a text. Lines are those that are not blank, and `repeats` is 0 if no two of them are equal."""
        if not lines:
            return "empty"
        if ended / lines < self.line_punct_thr and not (ended == 0 and self.line_punct_exclude_zero):
            return "line_punct_ratio"
        if short / lines > self.short_line_thr:
            return "short_line_ratio"
        repeated = 0
        if repeats:
            repeated = find_repeated([line for line in text.split("\n") if line and not line.isspace()])[1]
        if repeated / (len(text) - breaks) > self.char_duplicates_ratio:
            return "char_dup_ratio"
        if breaks / words > self.new_line_ratio:
            return "list_ratio"
        return None

"""Keep documents by their length in characters and words."""

from __future__ import annotations

from argosy.data.curate.curation_step import CurationStep, StepResult
from argosy.data.curate.text_batch import TextBatch


class Step(CurationStep):
    """Remove documents that are too short or too long. A limit of 0 disables its rule; punctuation counts as words."""

    min_characters: int = 200
    max_characters: int = 1_000_000
    min_words: int = 0
    max_words: int = 0

    def apply(self, batch: TextBatch) -> StepResult:
        result = StepResult()
        counts_words = bool(self.min_words or self.max_words)
        for number in batch.living():
            characters = len(batch.texts[number])
            words = int(batch.words.per_document[number]) if counts_words else 0
            if characters < self.min_characters or words < self.min_words:
                result.removed[number] = "short"
            elif (self.max_characters and characters > self.max_characters) or (
                self.max_words and words > self.max_words
            ):
                result.removed[number] = "long"
        return result

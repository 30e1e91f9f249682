"""The line and page rules of C4 (Raffel et al. 2020), with the decisions of datatrove's C4QualityFilter.

Lines that do not look like sentences are dropped, so this step changes texts. A sentence ends with a full stop, question or
exclamation mark before white space or the end of a line; datatrove asks NLTK's Punkt model, which needs a download.
"""

from __future__ import annotations

import re

from argosy.data.curate.curation_step import CurationStep, StepResult
from argosy.data.curate.text_batch import TextBatch

_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?:\s+|$)")
_ENDS = (".", "?", "!", '"', "'")
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


def count_sentences(line: str) -> int:
    """Return the number of sentences of a line; what follows the last end mark is one more."""
    ends = [match.end() for match in _SENTENCE_END.finditer(line)]
    return max(1, len(ends) + (not ends or ends[-1] < len(line)))


class Step(CurationStep):
    """Drop lines that are not sentences, and remove pages with few sentences, curly brackets or lorem ipsum."""

    remove_citations: bool = True
    filter_no_terminal_punct: bool = True
    # -1 disables each of the three.
    min_num_sentences: int = 5
    min_words_per_line: int = 3
    max_word_length: int = 1000
    filter_lorem_ipsum: bool = True
    filter_javascript: bool = True
    filter_curly_bracket: bool = True
    filter_policy: bool = True

    def apply(self, batch: TextBatch) -> StepResult:
        result = StepResult()
        for number in batch.living():
            text = batch.texts[number]
            kept, reason = self._lines(text)
            if reason is not None:
                result.removed[number] = reason
            elif kept != text:
                result.changed[number] = kept
        return result

    def _lines(self, text: str) -> tuple[str, str | None]:
        sentences, kept = 0, []
        for full_line in text.splitlines():
            line = full_line.strip()
            words = line.split()
            if self.max_word_length != -1 and any(len(word) > self.max_word_length for word in words):
                continue
            if self.remove_citations and "[" in line:
                line = _CITATION.sub("", line)
            if self.filter_no_terminal_punct and (not line.endswith(_ENDS) or line.endswith("...")):
                continue
            if len(words) < self.min_words_per_line:
                continue
            lower = line.lower()
            if self.filter_lorem_ipsum and "lorem ipsum" in lower:
                return text, "lorem_ipsum"
            if self.filter_javascript and "javascript" in lower:
                continue
            if self.filter_curly_bracket and "{" in line:
                return text, "curly_bracket"
            if self.filter_policy and any(phrase in lower for phrase in _POLICY):
                continue
            if self.min_num_sentences != -1:
                sentences += count_sentences(line)
            kept.append(line)
        if sentences < self.min_num_sentences:
            return text, "too_few_sentences"
        joined = "\n".join(kept).strip()
        return joined, None if joined else "empty"

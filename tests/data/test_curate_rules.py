"""The rules of curation make the decisions of datatrove's blocks, given the same words and sentences."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from datatrove.data import Document
from datatrove.pipeline.filters.c4_filters import C4QualityFilter
from datatrove.pipeline.filters.fineweb_quality_filter import FineWebQualityFilter
from datatrove.pipeline.filters.gopher_quality_filter import GopherQualityFilter
from datatrove.pipeline.filters.gopher_repetition_filter import GopherRepetitionFilter
from datatrove.pipeline.formatters.pii import PIIFormatter
from datatrove.utils import text as datatrove_text
from datatrove.utils.word_tokenizers import WordTokenizer
from nasty_texts import documents

from argosy.data.curate import characters, pii_masks
from argosy.data.curate.curation_step import step_class
from argosy.data.curate.gopher_repetition import Repeats
from argosy.data.curate.text_batch import TextBatch

WORD = re.compile(r"\w+|[^\w\s]+")
SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?:\s+|$)")


class OurWords(WordTokenizer):
    """Words by a regular expression, and sentences by their end marks."""

    def word_tokenize(self, text: str) -> list[str]:
        return WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        return [text[start:end] for start, end in self.span_tokenize(text)]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        ends = [match.end() for match in SENTENCE_END.finditer(text)]
        if not ends or ends[-1] < len(text):
            ends.append(len(text))
        return list(zip([0, *ends[:-1]], ends, strict=True))


WORDS = OurWords()
TEXTS = documents(2000)


def theirs(block: Any, text: str) -> tuple[str | None, str]:
    """Return why datatrove removes a document, and its text afterwards."""
    document = Document(text=text, id="")
    kept = block.filter(document)
    return (kept[1] if isinstance(kept, tuple) else None if kept else "removed"), document.text


def ours(name: str, texts: list[str], **keys: Any) -> list[tuple[str | None, str]]:
    found: list[tuple[str | None, str]] = []
    # Batches of several sizes: a document must not see its neighbours.
    sizes, at = [1, 7, 100, 500], 0
    while at < len(texts):
        batch = TextBatch(texts[at : at + sizes[len(found) % 4]])
        result = step_class(name)(**keys).apply(batch)
        found += [(result.removed.get(i), result.changed.get(i, text)) for i, text in enumerate(batch.texts)]
        at += len(batch.texts)
    return found


RULES: dict[str, Callable[[], Any]] = {
    "gopher_repetition": lambda: GopherRepetitionFilter(language=WORDS),
    "gopher_quality": lambda: GopherQualityFilter(language=WORDS),
    "fineweb_quality": lambda: FineWebQualityFilter(language=WORDS),
    "c4_quality": lambda: C4QualityFilter(language=WORDS),
}


@pytest.mark.parametrize("name", RULES)
def test_decisions_are_those_of_datatrove(name: str) -> None:
    block = RULES[name]()
    expected, found = [theirs(block, text) for text in TEXTS], ours(name, TEXTS)
    wrong = [(text, a, b) for text, a, b in zip(TEXTS, expected, found, strict=True) if a != b]
    assert not wrong, wrong[0]
    # The texts put every rule to the test: some are kept, and several reasons occur.
    reasons = Counter(reason for reason, _ in expected)
    assert reasons[None] > 20
    assert len(reasons) > 3


def test_masks_are_those_of_datatrove() -> None:
    masks = PIIFormatter(email_replacement="<email>", ip_replacement="<ip>")
    found = ours("mask_pii", TEXTS, email_replacement="<email>", ip_replacement="<ip>")
    expected = [masks.format(text) for text in TEXTS]
    assert [text for _, text in found] == expected
    assert sum("<email>" in text for text in expected) > 100
    assert sum("<ip>" in text for text in expected) > 100


_ATOM, _LABEL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+", r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
WHOLE = re.compile(rf"\b{_ATOM}(?:\.{_ATOM})*@(?:(?:{_LABEL}\.)+{_LABEL}|{pii_masks._LITERAL})")


def test_addresses_are_those_of_the_whole_pattern() -> None:
    rng = random.Random(0)
    pieces = [
        "a",
        "b1",
        "é",
        "@",
        "@",
        ".",
        ".",
        "-",
        "+",
        "_",
        " ",
        "[",
        "]",
        "1.2.3.4",
        "x.y",
        "a@b.c",
        "\n",
        "@[1.2.3.4]",
    ]
    for _ in range(5_000):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 14)))
        assert pii_masks.masked_emails(text, "<>") == WHOLE.sub("<>", text), text


def test_a_long_run_without_spaces_costs_one_look_for_each_at_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    class Counted:
        def __init__(self, pattern: re.Pattern[str]) -> None:
            self.pattern = pattern

        def match(self, text: str, *place: int) -> re.Match[str] | None:
            looks.append(len(text))
            return self.pattern.match(text, *place)

    for name in ("_ATOMS", "_DOMAIN"):
        monkeypatch.setattr(pii_masks, name, Counted(getattr(pii_masks, name)))
    run = "QUJD+/x9" * (1 << 17)
    assert pii_masks.masked_emails(f"{run}@{run}", "<>") == f"{run}@{run}"
    assert len(looks) == 1
    assert pii_masks.masked_emails(f"{run}@b.c {run}", "<>") == f"<> {run}"
    assert len(looks) == 3


def test_the_sets_of_punctuation_are_those_of_datatrove() -> None:
    assert characters.TERMINAL_PUNCTUATION == datatrove_text.TERMINAL_PUNCTUATION
    assert characters.SYMBOLS == datatrove_text.PUNCTUATION_SET


def test_words_are_those_of_the_regular_expression() -> None:
    batch, split = TextBatch(TEXTS[:300]), WORD.findall
    expected = [split(text) for text in batch.texts]
    assert batch.words.per_document.tolist() == [len(words) for words in expected]
    assert batch.words.lengths.tolist() == [len(word) for words in expected for word in words]
    # Equal words have equal hashes, and different ones different hashes.
    named: dict[str, int] = {}
    for word, value in zip((w for words in expected for w in words), batch.words.hashes.tolist(), strict=True):
        assert named.setdefault(word, value) == value
    assert len(set(named.values())) == len(named)


def test_folded_words_have_no_case_no_accents_and_one_digit() -> None:
    # The second text has characters beyond Latin-1, the third one beyond two bytes.
    pairs = {
        "École: 42 MÈTRES, don't_Stop": "ecole 00 metres don t_stop",
        "“ÅNGSTRÖM” Ἀθήνα ２２ x²": "angstrom αθηνα ２２ x0",
        "İstanbul 😀 ЁЛКА": "istanbul елка",
    }
    for text, plain in pairs.items():
        # Around it are texts with other words.
        folded = TextBatch(["A1 b", text, "C"]).folded_words
        expected = TextBatch(["a0 b", plain, "c"]).words
        assert folded.per_document.tolist() == expected.per_document.tolist()
        assert folded.hashes.tolist() == expected.hashes.tolist()


@pytest.mark.parametrize("times", [2, 256, 257, 65537])
def test_an_n_gram_that_occurs_any_number_of_times_is_found(times: int) -> None:
    # Every word but one is another, so the n-gram of one word is the only one that repeats.
    text = " ".join(f"same w{number}" for number in range(times))
    words = TextBatch([text]).words
    starts = words.gram_starts(1, np.ones(1, np.bool_))
    assert len(Repeats(words, 1, starts, words.joined_grams(1, starts)).later) == times - 1


def test_languages_are_told_apart() -> None:
    texts = {
        "en": "The quick way to find out what a language is: count the words that have no meaning of their own, and there are many of them in this.",
        "de": "Der einfachste Weg ist es, die Wörter zu zählen, die für sich nicht viel bedeuten, und das sind in einer Sprache wie dieser nicht wenige.",
        "fr": "Le moyen le plus simple est de compter les mots qui sont dans une langue pour relier les autres, et ils sont plus nombreux avec cette phrase.",
        "es": "El modo más simple es contar las palabras que no dicen mucho por sí mismas, pero que son muy frecuentes en los textos de una lengua como esta.",
        "ru": "Самый простой способ состоит в том, чтобы посмотреть на буквы.",
        "ja": "これは日本語の文章であり、漢字と仮名が混ざっています。",
        "zh": "这是一个中文句子,没有假名。",
    }
    for language in texts:
        found = ours("language", list(texts.values()), keep=(language,))
        assert [reason is None for reason, _ in found] == [name == language for name in texts]

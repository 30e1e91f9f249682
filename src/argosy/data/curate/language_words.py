"""Tell languages apart by their most frequent words, or by their script.

In running text of a European language a fifth to a third of the words are function words, and few of them are shared with another
language. That needs no model file. It is meant for documents, not for single sentences: for finer work let fastText or GlotLID write
a label, and keep records by it with the step `field`.

Languages that are not listed are "unknown". Those near to a listed one have evidence in `unlisted_languages`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import field_validator

from argosy.data.curate.curation_step import CurationStep, StepResult
from argosy.data.curate.text_batch import TextBatch
from argosy.data.curate.unlisted_languages import OTHER_WORDS, is_other_language
from argosy.data.curate.word_sequence import Hashes

# Folded: lower case, without accents.
FUNCTION_WORDS = {
    "en": "the of and to in is that it for was on are as with his they be at this have from or had by but not what were when your",
    "de": "der die und das den nicht mit dem ist im eine sich auch auf fur von zu ein des werden bei oder wie einer nach wird aus",
    "fr": "le les des et est dans pour une pas sur qui plus avec ce sont du par au il elle nous vous mais ont cette aux leur ses de la en un que ne se",
    "es": "el los las que una por con para como pero sus del mas este fue esta han son muy entre cuando todo ya hay desde su lo es de la en se un al no",
    "it": "il che di per una non sono del della con gli nel come anche piu alla dei ha delle ma si questo degli nella da al era la le un in lo se",
    "pt": "os que uma nao com para mais dos como ao das pela foi seu sua ou ser quando muito tem nos ja pelo isso pelos da em do de um se na no as",
    "nl": "het een van en dat niet zijn op te met voor aan er om dan zou maar ook bij wordt door naar heeft hij deze uit nog kan de in is als die of",
    "sv": "och att det som en pa ar av for med den till inte har de ett om han men var fran sig hon under eller kan nar ska aven",
    "pl": "nie sie na jest ze jak przez ale po tak co dla od byc tego juz czy oraz ktory moze tylko ma lub ich jego sa byl bardzo do za",
}
# Name -> ranges of code points. A script stands for its most written language.
SCRIPTS = {
    "zh": ((0x4E00, 0x9FFF), (0x3400, 0x4DBF)),
    "ja": ((0x3040, 0x30FF),),
    "ko": ((0xAC00, 0xD7AF), (0x1100, 0x11FF)),
    "ru": ((0x0400, 0x04FF),),
    "el": ((0x0370, 0x03FF),),
    "ar": ((0x0600, 0x06FF), (0x0750, 0x077F)),
    "he": ((0x0590, 0x05FF),),
    "hi": ((0x0900, 0x097F),),
    "th": ((0x0E00, 0x0E7F),),
}
LANGUAGES = (*FUNCTION_WORDS, *SCRIPTS)
# Japanese is written with Chinese characters too: this share of kana among the letters makes a text Japanese.
_KANA_SHARE = 0.1


class Step(CurationStep):
    """Remove documents that are not in one of the languages of `keep`."""

    keep: tuple[str, ...] = ("en",)
    # The smallest share of a language's function words among the words, or of its script among the letters.
    min_share: float = 0.1

    @field_validator("keep")
    @classmethod
    def _known(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in keep if name not in LANGUAGES]
        if unknown or not keep:
            raise ValueError(f"{', '.join(unknown) or 'no language'}: known are {', '.join(LANGUAGES)}")
        return keep

    def apply(self, batch: TextBatch) -> StepResult:
        shares = language_shares(batch)
        best = shares.argmax(axis=0)
        result = StepResult()
        for number in batch.living():
            name = LANGUAGES[best[number]] if best[number] < len(LANGUAGES) else None
            if name is None or shares[best[number], number] < self.min_share:
                result.removed[number] = "unknown"
            elif name not in self.keep:
                result.removed[number] = name
        return result


@cache
def _table() -> tuple[Hashes, npt.NDArray[np.bool_]]:
    """Return the sorted hashes of all function words, and which language has which."""
    hashes = [TextBatch([words]).folded_words.hashes for words in (*FUNCTION_WORDS.values(), *OTHER_WORDS.values())]
    every = np.unique(np.concatenate(hashes))
    return every, np.stack([np.isin(every, of_language) for of_language in hashes])


def language_shares(batch: TextBatch) -> npt.NDArray[np.float64]:
    """Return for each language and each document the share of its function words, or of its script.

    The rows are those of LANGUAGES, and then of OTHER_WORDS.
    """
    words, count = batch.folded_words, len(batch.texts)
    every, of_language = _table()
    place = np.minimum(np.searchsorted(every, words.hashes), len(every) - 1)
    found = every[place] == words.hashes
    documents, place = words.document_of[found], place[found]
    per_word: npt.NDArray[Any] = np.zeros((count, len(every)))
    np.add.at(per_word, (documents, place), 1)
    total = np.maximum(words.per_document, 1)
    latin = (per_word @ of_language.T).T / total
    scripts = np.array([_script_shares(text) for text in batch.texts]).reshape(count, len(SCRIPTS)).T
    listed = len(FUNCTION_WORDS)
    return np.concatenate((latin[:listed], scripts, latin[listed:]))


def _script_shares(text: str) -> list[float]:
    if text.isascii():
        return [0.0] * len(SCRIPTS)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    counts = {
        name: int(sum(((codes >= low) & (codes <= high)).sum() for low, high in ranges))
        for name, ranges in SCRIPTS.items()
    }
    letters = max(1, sum(map(str.isalpha, text)))
    if counts["ja"] > _KANA_SHARE * letters:
        counts["ja"], counts["zh"] = counts["ja"] + counts["zh"], 0
    counts |= {name: 0 for name, count in counts.items() if count and is_other_language(name, text, count)}
    return [counts[name] / letters for name in SCRIPTS]

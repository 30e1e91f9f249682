"""Evidence for languages that the step `language` cannot keep, so that they are not taken for a listed neighbour.

A language in Latin script is known by its function words, like a listed one. Another script stands for one listed language: a text
in it has another language if it has letters or words that the listed language lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable

# Folded, as the words of listed languages. Words that a language shares with a listed one are here too: the larger share wins.
OTHER_WORDS = {
    "da": "og det at er en til af som pa de med han den for ikke der var har jeg et om men vi hun fra sig blev efter eller kan hvor",
    "no": "og det er pa som en til av for med at var de ikke den har han jeg et om fra men ble vi etter seg eller hun kan hvor ogsa",
    "is": "og að er sem til við um en var með ekki hann frá af hefur eru það hún eftir vera verið fyrir voru upp þá ef nú því þar",
    "af": "die van en het in is nie dat met vir op wat te om hy sy was ook deur aan word maar hulle ons as sal kan na daar uit of by",
    "lb": "an vun de den der ass eng op mat fir dat net och war awer nach hunn sinn gouf huet bei zu dem all een wei si dass vum",
    "ca": "que de la el els les en per amb una es del dels al com mes no va van se un seva aquest aquesta pero tambe molt son hi ha",
    "gl": "que de unha non con para mais dos como ao das pola foi se as un ou ser cando moi ten nos xa polo isto da en do os na no",
    "oc": "que de la los las es en una dins per amb lo son del dels mai pas un al aquel foguet sus tanben mas coma fa se aquela",
    "ro": "si de in la cu pe nu care este un din sa ca mai au fost pentru sunt dar sau ce prin al ale lui se ei era cand dupa fi",
    "cs": "se na je ze to do pro jsou jako by ale po jeho byl nebo ktery jsem tak si jeste pri byla bylo az co jen od jak kdyz za",
    "sk": "sa na je ze to do pre su ako by ale po jeho bol alebo ktory som tak si este pri bola bolo az co len od ked aj za vsak",
    "hr": "je na se da su za od koji to kao sto ne bi ali bio po iz do jos bila samo sa ili biti nije kako smo sam koja bilo ih",
    "sl": "je na se da so za od ki to kot ne bi pa bil po iz do bila samo ali tudi ni kako sem jih pri bilo ter ko ga lahko",
    "ast": "que de la los les nun en una del pa por con como nel ye no al se un esti esta mas son pal pero foi ta nos",
    "an": "que de os as en una no con ta ye un se como mas por ha son pero na iste ista estar yera",
    "fur": "di il la che in par al no un cun dal lis une sul dai si son ma je tal del ai stat essi",
    "eo": "la de kaj en estas al por ne kun estis ke sur el pri kiel oni tiu ci au se povas sed da nur pli li",
    "ia": "le de in non un es pro con que esser al per del se illo como iste esseva plus qui ha",
    "li": "de van in is op te neet veur mit of waere waert es ein einen det en um die zien haet nao",
    "lt": "ir yra kad ar is su tai ne buvo kaip bet nuo arba uz po apie jei tik nera jo ji jis del prie",
    "sq": "te ne nje dhe per me nuk eshte qe se ka si ose nga do po kete ishte mund",
    "tl": "ang ng sa na mga ay hindi para at ito isang may kung ni si pa lamang nang",
}
# Share of a script's letters from which on they belong to another language. A name quoted in a text stays below it.
_FOREIGN_SHARE = 0.01
# The same for ъ, which Russian has rarely.
_HARD_SHARE = 0.005
# Ukrainian, Belarusian, Serbian, Macedonian, Kazakh and others, but not Russian.
_NOT_RUSSIAN = re.compile("[\u0400\u0402-\u040f\u0450\u0452-\u045f\u0460-\u052f]")
# Persian, Urdu, Pashto, Uyghur and others, but not Arabic: peh, tcheh, gaf, farsi yeh and the like.
_NOT_ARABIC = re.compile("[\u0672-\u06d3\u06d5\u06ee-\u06ef\u0750-\u077f]")
# Ligatures of Yiddish.
_NOT_HEBREW = re.compile("[\u05f0-\u05f2]")
_HINDI = {"है", "हैं", "के", "का", "की", "में", "से", "को", "पर", "और", "यह", "ने", "था", "थे", "थी", "एक", "नहीं", "भी", "कि"}
_MARATHI_NEPALI = {
    "आहे", "आहेत", "आणि", "या", "होते", "होता", "नाही", "ही", "हे", "हा", "तो", "ते", "व", "एक", "मध्ये", "असे", "म्हणून",
    "छ", "छन्", "र", "मा", "को", "का", "हो", "यो", "पनि", "भएको", "गर्न", "लागि", "थियो", "भने", "छैन", "हुन्छ", "गरेको",
}  # fmt: skip


def is_other_language(listed: str, text: str, letters: int) -> bool:
    """Return whether a text in the script of a listed language is in another language.

    Args:
        listed: the language that the script stands for.
        letters: the number of letters of that script in the text.
    """
    test = _TESTS.get(listed)
    return test is not None and test(text, letters)


def _is_not_russian(text: str, letters: int) -> bool:
    if _has_many(_NOT_RUSSIAN, text, letters):
        return True
    # Bulgarian is written with Russian letters, but without ы, and with ъ as a vowel.
    lower = text.lower()
    hard = lower.count("ъ")
    return hard > max(1, lower.count("ы"), _HARD_SHARE * letters)


def _is_not_hindi(text: str, letters: int) -> bool:
    words = re.split(r"[\s।,.?!]+", text)
    # A language attaches its postpositions to words in part, so it need not have many of its own.
    return sum(word in _MARATHI_NEPALI for word in words) > sum(word in _HINDI for word in words)


def _has_many(pattern: re.Pattern[str], text: str, letters: int) -> bool:
    return len(pattern.findall(text)) > _FOREIGN_SHARE * letters


_TESTS: dict[str, Callable[[str, int], bool]] = {
    "ru": _is_not_russian,
    "ar": lambda text, letters: _has_many(_NOT_ARABIC, text, letters),
    "he": lambda text, letters: _has_many(_NOT_HEBREW, text, letters),
    "hi": _is_not_hindi,
}

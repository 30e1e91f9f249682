"""Tables over all Unicode code points: the kind of a character, and its folded form for comparing texts.

They come from Python's own character data. A process computes what the characters of its texts need, and no more.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

CODE_POINTS = 0x110000
# Bits of `kinds`. A character that is neither SPACE nor WORD is punctuation or a symbol. FOLDS: a WORD character is not its own folded
# form. TERMINAL: it ends a sentence. MARK: a rule counts it.
SPACE, WORD, LETTER, NOT_SYMBOL, FOLDS, TERMINAL, MARK = 1, 2, 4, 8, 16, 32, 64
# Code points from here on have no case and no decomposition that matters: mostly CJK.
_FOLDED_UP_TO = 0x3000

# The sets that Gopher's rules use, as datatrove 0.10 defines them: characters that make a "symbol word", and those that end a sentence.
TERMINAL_PUNCTUATION = frozenset(
    "᪩？⁈𑩂．꩞𑅃﹗𑂾\u1b7d፧𑅂꡶꘎⁉࠾᪨𑊩𑱂᱿𖩮᥅\U00011f43\U00011f44﹒𑈹𑈸።܂؞꛳\U00010f88𑗍𐩖𑙂\u061d꩟᠉\u1b7e𑗗᰼𑻸؟𑪜꧉𑗉𐽙𖫵𖬷܀꓿᜵𑗏𑁇𑗓𑥄៖𑥆𑗑𑗒꯫۔𐩗\U00010f86꡷\u2e54｡"
    "៕߹⸮.𑇅࠹𛲟꫰꤯𐽗᭞𑜼፨𑃁꣏𑇟𖬸𑪛𑜾࠷𝪈?𑃀𑗃！։꣎॥𑗖᭛᠃!၊𖺘⁇𑗌𑑋𖭄᭟𑅁𑙁⸼꩝𑗋。꧈꫱𑜽𐽖𑂿᙮។꛷\U00010f89៚᥄𑗕𑗎᪪᭚࠽𑇞𑗊𐽘\u2e53𑗔𖩯𑇍𑻷𐽕𑩃।𑗂𑇆𑁈။᱾𑱁꘏܁᜶‼𑈻‽᪫﹖𑑌𑈼"
    "\U00010f87𑗐៙᰻"
)
_CONTROLS = frozenset(chr(code) for low, high in ((0, 9), (11, 32), (127, 160)) for code in range(low, high))
SYMBOLS = (
    frozenset("!/—”:％１〈&(、━\\【#%「」，】；+^]~“《„';’{|∶´[=-`*．（–？！：$～«〉,><》)?）。…@_.\"}►»")
    | _CONTROLS
    | TERMINAL_PUNCTUATION
)


class CharacterTable:
    """A value of every code point, computed when a text first brings the character.

    Args:
        value_of: Computes the value of a character.
        dtype: An unsigned integer whose largest value is no character's.
    """

    def __init__(self, value_of: Callable[[str], int], dtype: type[np.unsignedinteger[Any]]) -> None:
        self._value_of, self._unknown = value_of, np.iinfo(dtype).max
        self._values = np.full(CODE_POINTS, self._unknown, dtype)
        # The values of the first 256 characters.
        self.latin = self.look_up(np.arange(256))

    def look_up(self, codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the values of some characters."""
        found: npt.NDArray[Any] = self._values.take(codes)
        unknown = np.flatnonzero(found == self._unknown)
        if len(unknown):
            for code in set(codes[unknown].tolist()):
                self._values[code] = self._value_of(chr(code))
            found[unknown] = self._values.take(codes[unknown])
        return found


@cache
def kinds() -> CharacterTable:
    """Return the kinds of characters, as bits. Words are what the regular expression `\\w+` matches."""
    return CharacterTable(_kind, np.uint8)


@cache
def folded() -> CharacterTable:
    """Return the folded forms of characters: lower case, without accents, and 0 for every digit."""
    return CharacterTable(_folded, np.uint32)


def _kind(character: str) -> int:
    if character.isspace():
        return SPACE
    kind = 0 if character in SYMBOLS else NOT_SYMBOL
    if character in TERMINAL_PUNCTUATION:
        kind |= TERMINAL
    if character in "#.…-•":
        kind |= MARK
    if character.isalpha():
        kind |= LETTER
    if character.isalnum() or character == "_":
        kind |= WORD | (FOLDS if _folded(character) != ord(character) else 0)
    return kind


def _folded(character: str) -> int:
    if ord(character) >= _FOLDED_UP_TO:
        return ord(character)
    return ord("0" if character.isdigit() else unicodedata.normalize("NFD", character.lower())[0])

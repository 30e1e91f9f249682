"""Tables over all Unicode code points: the kind of a character, and its folded form for comparing texts.

They are made from Python's own character data when they are first used, in about 0.2 s.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

CODE_POINTS = 0x110000
# Bits of `kinds`. A character that is neither SPACE nor WORD is punctuation or a symbol.
SPACE, WORD, LETTER, NOT_SYMBOL = 1, 2, 4, 8
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


@cache
def kinds() -> npt.NDArray[np.uint8]:
    """Return the kind of every code point, as bits. Words are what the regular expression `\\w+` matches."""
    characters = [chr(code) for code in range(CODE_POINTS)]

    def where(test: Any) -> npt.NDArray[np.uint8]:
        return np.fromiter(map(test, characters), np.bool_, CODE_POINTS).view(np.uint8)

    space = where(str.isspace)
    table = space * SPACE | where(str.isalnum) * WORD | where(str.isalpha) * LETTER | (1 - space) * NOT_SYMBOL
    table[ord("_")] |= WORD
    table[[ord(character) for character in SYMBOLS]] &= ~np.uint8(NOT_SYMBOL)
    table.setflags(write=False)
    return table


@cache
def folded() -> npt.NDArray[np.uint64]:
    """Return the folded form of every code point: lower case, without accents, and 0 for every digit."""
    table = np.arange(CODE_POINTS, dtype=np.uint64)
    for code in range(_FOLDED_UP_TO):
        character = chr(code)
        if character.isdigit():
            table[code] = ord("0")
        else:
            table[code] = ord(unicodedata.normalize("NFD", character.lower())[0])
    table.setflags(write=False)
    return table

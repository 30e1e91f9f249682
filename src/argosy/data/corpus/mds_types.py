"""Whether a column of plain bytes is read as the type it was written in, which nothing in MDS says.

Too narrow a type splits each id in two or four: the low half, and a high half that is 0 or nearly. Too wide a type glues ids
together. The two are told apart by comparing neighbours. In a run of ids the second of a pair is as often the larger one as the
first; of the two halves of one number the high one hardly ever is, since ids use the low bits. Padding does not disturb this:
pairs of equal numbers are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.errors import ArgosyError

_NAMES = {8: "int64", 4: "int32", 2: "uint16"}  # by bytes of an id; a signed type holds every vocabulary there is
_MOST_IDS = 1 << 20  # larger than vocabularies are; used where none is known
_ENOUGH = 32  # pairs that must differ; of so many ids, 4 or fewer would fall on one side once in 100,000 corpora
_HALVES = (
    3 / 8
)  # share of pairs with the second larger: 1/2 for ids, at most 1/4 for the halves of ids spread over 31 bits
_LOOKED_AT = 1 << 22  # bytes


def check_type(
    path: Path, values: Sequence[memoryview], dtype: np.dtype[Any], vocab_size: int | None, column: str
) -> None:
    """Refuse a type that the bytes of these samples contradict, and name the one that fits."""
    limit = vocab_size or _MOST_IDS
    sizes = [len(value) for value in values]
    whole = [width for width in _NAMES if not any(size % width for size in sizes)]
    data, at = b"", 0
    while at < len(values) and len(data) < _LOOKED_AT:
        data, at = b"".join((data, *values[at : at + 256])), at + 256
    why = _contradiction(data, sizes, whole, dtype, limit)
    if why is None:
        return
    fitting = _fitting(data, whole, limit)
    raise ArgosyError(
        "data.bad-mds",
        f"{path}: column {column!r} is not {dtype.name}: {why}",
        key="--bytes-dtype",
        value=dtype.name,
        fix=f"--bytes-dtype {fitting}" if fitting else "give the type the column was written in, or another --column",
    )


def _contradiction(
    data: bytes, sizes: Sequence[int], whole: Sequence[int], dtype: np.dtype[Any], limit: int
) -> str | None:
    width = dtype.itemsize
    if width not in whole and any(size % width for size in sizes):
        number = next(number for number, size in enumerate(sizes) if size % width)
        return f"sample {number:,} has {sizes[number]:,} bytes, no multiple of {width}"
    for wider in whole:
        if wider > width and _holds_ids(data, wider, limit) and _are_halves(data, wider):
            parts, ids = wider // width, _read(data, wider)
            rest = np.frombuffer(data, dtype).reshape(-1, parts)[:, 1:]
            return (
                f"of every {parts} ids the last {parts - 1} are never above {int(rest.max()):,}, while {len(ids):,} ids of "
                f"{wider} bytes are all below {limit:,}"
            )
    if width in whole and width > min(_NAMES) and not _holds_ids(data, width, limit) and not _are_halves(data, width):
        largest = int(_read(data, width).max())
        return f"it would hold the id {largest:,}, and the halves of its ids look like ids themselves"
    return None


def _fitting(data: bytes, whole: Sequence[int], limit: int) -> str | None:
    """The widest type whose ids are within the vocabulary and are no two ids each; else the narrowest."""
    fits = [w for w in whole if _holds_ids(data, w, limit) and (w == min(_NAMES) or _are_halves(data, w))]
    return _NAMES[fits[0]] if fits else None


def _read(data: bytes, width: int) -> npt.NDArray[Any]:
    return np.frombuffer(data, f"<u{width}")


def _holds_ids(data: bytes, width: int, limit: int) -> bool:
    ids = _read(data, width)
    return not len(ids) or int(ids.max()) < limit


def _are_halves(data: bytes, width: int) -> bool:
    """Whether numbers half as wide are the low and the high halves of ids."""
    low, high = _read(data, width // 2).reshape(-1, 2).T
    larger = int((high > low).sum())
    pairs = larger + int((high < low).sum())
    # Of ids, half of the pairs would have the second larger, with a standard deviation of sqrt(pairs) / 2.
    return pairs >= _ENOUGH and larger < min(_HALVES * pairs, pairs / 2 - 2 * math.sqrt(pairs))

"""Detect the wrong dtype for an MDS column of plain bytes. MDS itself does not record the dtype.

Too narrow a dtype splits each id in two or four: the low half, and a high half that is 0 or nearly. Too wide a dtype joins
ids together. Comparing neighbours distinguishes the cases. In a run of ids, the second of a pair is the larger one as often
as the first. Of the two halves of one number, the high half is hardly ever the larger one, because ids use the low bits.
Padding does not disturb this: pairs of equal numbers are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.errors import ArgosyError

# dtype by bytes per id. Signed types of 4 and 8 bytes hold every vocabulary.
_NAMES = {8: "int64", 4: "int32", 2: "uint16"}
# The vocabulary size to assume if none is known; real vocabularies are smaller.
_MOST_IDS = 1 << 20
# The number of unequal pairs needed for a verdict. With 32 pairs of ids, 4 or fewer fall on one side once in 100,000 corpora.
_ENOUGH = 32
# The threshold for the fraction of pairs whose second number is larger: 1/2 for ids, at most 1/4 for halves of ids spread over
# 31 bits.
_HALVES = 3 / 8
# How much of the column is examined.
_EXAMINED = 1 << 22  # bytes


def check_type(
    path: Path, values: Sequence[memoryview], dtype: np.dtype[Any], vocab_size: int | None, column: str
) -> None:
    """Refuse a dtype that contradicts the bytes of these samples. The error names a dtype that fits."""
    limit = vocab_size or _MOST_IDS
    sizes = [len(value) for value in values]
    whole = [width for width in _NAMES if not any(size % width for size in sizes)]
    data, at = b"", 0
    while at < len(values) and len(data) < _EXAMINED:
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
    """Return the widest dtype whose ids are within the vocabulary and are not two ids joined, or None."""
    fits = [w for w in whole if _holds_ids(data, w, limit) and (w == min(_NAMES) or _are_halves(data, w))]
    return _NAMES[fits[0]] if fits else None


def _read(data: bytes, width: int) -> npt.NDArray[Any]:
    return np.frombuffer(data, f"<u{width}")


def _holds_ids(data: bytes, width: int, limit: int) -> bool:
    ids = _read(data, width)
    return not len(ids) or int(ids.max()) < limit


def _are_halves(data: bytes, width: int) -> bool:
    """Return True if numbers of half this width are the low and high halves of ids."""
    low, high = _read(data, width // 2).reshape(-1, 2).T
    larger = int((high > low).sum())
    pairs = larger + int((high < low).sum())
    # For ids, the second number is larger in half of the pairs, with a standard deviation of sqrt(pairs) / 2.
    return pairs >= _ENOUGH and larger < min(_HALVES * pairs, pairs / 2 - 2 * math.sqrt(pairs))

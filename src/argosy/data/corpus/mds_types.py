"""Detect the wrong dtype for an MDS column of plain bytes. MDS itself does not record the dtype.

Too narrow a dtype splits each id in two or four: the low half, and a high half that is 0 or nearly. Too wide a dtype joins
ids together. Comparing neighbours distinguishes the cases. In a run of ids, the second of a pair is the larger one as often
as the first. Of the two halves of one number, the high half is hardly ever the larger one, because ids use the low bits.
Padding does not disturb this: pairs of equal numbers are left out, and so are small negative numbers, such as -1 and -100.

Some columns are left undecided, because refusing real ids is worse than reading a rare column wrongly: fewer than 17 ids, and
ids that are all above 65,535 or all paired with one other id.
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
# The number of unequal pairs needed for a verdict. Of 17 pairs of ids, none has the larger number second once in 100,000 corpora.
_ENOUGH = 17
# The threshold for the fraction of pairs whose second number is larger: 1/2 for ids, at most 1/4 for halves of ids spread over
# 31 bits.
_HALVES = 3 / 8
# The least fraction of ids whose high half is 0. Chinese text in a vocabulary of 150,000 has about a third. Pairs such as
# (id, 3), read as one number, have none.
_LOW_IDS = 1 / 8
# Columns mark padding and labels to ignore with small negative numbers.
_LEAST_MARK = -(1 << 15)
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
        if wider > width and _are_wide_ids(data, wider, limit):
            return _split(data, dtype, wider, limit)
    if width not in whole or width == min(_NAMES):
        return None
    if not _holds_ids(data, width, limit) and (not _are_halves(data, width) or _exceeds_32_bits(data, width)):
        ids = _read(data, width)
        worst = max(int(ids.min()), int(ids.max()), key=abs)
        return f"it would hold the id {worst:,}, and the halves of its ids look like ids themselves"
    if _are_joined(data, width, limit):
        return f"both halves of its ids are below {max(1, limit >> 4 * width)}, and either is as often the larger one"
    return None


def _split(data: bytes, dtype: np.dtype[Any], wider: int, limit: int) -> str:
    """Return the cause for a dtype that splits ids of `wider` bytes."""
    parts, ids = wider // dtype.itemsize, _read(data, wider)
    rest = np.frombuffer(data, dtype).reshape(-1, parts)[ids >= 0, 1:]
    marks = f", beside {len(ids) - len(rest):,} small negative numbers" if len(rest) < len(ids) else ""
    return (
        f"of every {parts} ids the last {parts - 1} are never above {int(rest.max()):,}, while {len(rest):,} ids of "
        f"{wider} bytes are all below {limit:,}{marks}"
    )


def _fitting(data: bytes, whole: Sequence[int], limit: int) -> str | None:
    """Return the widest dtype whose ids are within the vocabulary and are not two ids joined, or None."""
    fits = [w for w in whole if (_holds_ids if w == min(_NAMES) else _are_wide_ids)(data, w, limit)]
    return _NAMES[fits[0]] if fits else None


def _read(data: bytes, width: int) -> npt.NDArray[Any]:
    return np.frombuffer(data, f"<u{width}" if width <= min(_NAMES) else f"<i{width}")


def _halves(data: bytes, width: int) -> npt.NDArray[Any]:
    """Return the low and the high halves of the numbers of this width that are not negative."""
    halves = np.frombuffer(data, f"<u{width // 2}").reshape(-1, 2)
    return halves[_read(data, width) >= 0].T


def _holds_ids(data: bytes, width: int, limit: int) -> bool:
    ids = _read(data, width)
    return not len(ids) or (int(ids.max()) < limit and int(ids.min()) >= _LEAST_MARK)


def _exceeds_32_bits(data: bytes, width: int) -> bool:
    return width == max(_NAMES) and int(_read(data, width).max()) >> 32 > 0


def _compare(data: bytes, width: int) -> tuple[int, int]:
    """Return the number of ids whose high half is the larger one, and of those whose halves differ."""
    low, high = _halves(data, width)
    larger = int((high > low).sum())
    return larger, larger + int((high < low).sum())


def _are_halves(data: bytes, width: int) -> bool:
    """Return True if numbers of half this width are the low and high halves of ids."""
    larger, pairs = _compare(data, width)
    # For ids, the second number is larger in half of the pairs, with a standard deviation of sqrt(pairs) / 2.
    return pairs >= _ENOUGH and larger < min(_HALVES * pairs, pairs / 2 - 2 * math.sqrt(pairs))


def _are_wide_ids(data: bytes, width: int, limit: int) -> bool:
    """Return True if the numbers of this width are ids of a vocabulary, and those of half this width are not."""
    if not _holds_ids(data, width, limit) or not _are_halves(data, width):
        return False
    _, high = _halves(data, width)
    return width == min(_NAMES) or int((high == 0).sum()) >= _LOW_IDS * len(high)


def _are_joined(data: bytes, width: int, limit: int) -> bool:
    """Return True if each number is two ids of a tiny vocabulary: too small to exceed `limit` when joined."""
    low, _ = _halves(data, width)
    larger, pairs = _compare(data, width)
    return pairs >= 2 * _ENOUGH and larger >= _HALVES * pairs and int(low.max()) < max(1, limit >> 4 * width)

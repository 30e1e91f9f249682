"""A file of named arrays: a line of JSON with their dtypes and shapes, then their bytes. It is read through a memory map."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from argosy.files import replace_file

Array = npt.NDArray[Any]
_ALIGNMENT = 8


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write the arrays to `path`, all or none, also if the machine loses power."""
    little = {name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in arrays.items()}
    header = orjson.dumps([(name, array.dtype.str, array.shape) for name, array in little.items()])
    parts = [header + b" " * (-(len(header) + 1) % _ALIGNMENT) + b"\n"]
    for array in little.values():
        content = array.tobytes()
        parts.append(content + b"\0" * (-len(content) % _ALIGNMENT))
    replace_file(path, b"".join(parts), sync=True)


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of a file. Their pages are read when they are used."""
    with path.open("rb") as file:
        header = file.readline()
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arrays, at = {}, len(header)
    for name, dtype, shape in orjson.loads(header):
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(content, dtype, count, at).reshape(shape)
        at += -(-arrays[name].nbytes // _ALIGNMENT) * _ALIGNMENT
    return arrays

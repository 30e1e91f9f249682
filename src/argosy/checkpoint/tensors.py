"""Tensors to a safetensors file, hashed on the way; and back.

The format is a length, a JSON header of names, types, shapes and offsets, and the raw bytes. It is written and read here
one tensor at a time, so that saving needs no second copy of the model, the hash no second reading of the file, and a
conversion no more memory than its largest tensor.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
import torch
from torch import Tensor

from argosy.errors import ArgosyError
from argosy.parallel.shards import whole

_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write and sync the file; return its SHA-256. What is spread over ranks is gathered when its turn comes, for which the
    other ranks call `gather_tensors`."""
    infos = {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}
    return write_stream(path, infos, lambda name: whole(tensors[name]))


def gather_tensors(tensors: Mapping[str, Tensor]) -> None:
    """The part that ranks which write nothing have in a `write_tensors` of the same."""
    for tensor in tensors.values():
        whole(tensor)


def write_stream(
    path: Path,
    infos: Mapping[str, TensorInfo],
    make: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """The same for tensors that are made when their turn comes, in the order of `infos`."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, info in infos.items():
        offsets = [offset, offset + info.nbytes]
        header[name] = {"dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": offsets}
        offset += info.nbytes
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)  # tensors start on a multiple of eight
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            file.write(part)
            digest.update(part)
        for name, info in infos.items():
            tensor = make(name)
            if TensorInfo.of(tensor) != info:
                raise ValueError(f"{name} was promised as {info} and made as {TensorInfo.of(tensor)}")
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    file = TensorFile(path)
    return {name: file.read(name) for name in file.infos}


class TensorFile:
    """A safetensors file of which only what is asked for is read. The header is checked against the file's size."""

    def __init__(self, path: Path, *, code: str = "checkpoint.corrupt", fix: str = "use another checkpoint") -> None:
        self.path, self._code, self._fix = path, code, fix
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                    raise self._bad(f"its {size:,} bytes do not begin with a header")
                header = orjson.loads(file.read(length))
            self._start = 8 + length
            self._offsets: dict[str, int] = {}
            self.infos: dict[str, TensorInfo] = {}
            for name, entry in header.items():
                if name != "__metadata__":
                    self._add(name, entry["dtype"], entry["shape"], entry["data_offsets"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._bad(str(error)) from None
        promised = self._start + max((self._offsets[n] + info.nbytes for n, info in self.infos.items()), default=0)
        if promised != size:
            raise self._bad(f"it has {size:,} bytes, and its header promises {promised:,}")

    def _add(self, name: str, dtype: str, shape: list[int], offsets: list[int]) -> None:
        if dtype not in _TYPES:
            raise self._bad(f"{name} is of type {dtype}, which is none of {', '.join(_TYPES)}")
        info = TensorInfo(_TYPES[dtype], tuple(int(size) for size in shape))
        first, last = (int(offset) for offset in offsets)
        if first < 0 or min(info.shape, default=0) < 0 or last - first != info.nbytes:
            raise self._bad(f"{name} of shape {list(info.shape)} in {dtype} does not take bytes {first} to {last}")
        self.infos[name], self._offsets[name] = info, first

    def read(self, name: str) -> Tensor:
        info = self.infos[name]
        content = torch.empty(info.nbytes, dtype=torch.uint8)
        view = content.numpy().data
        try:
            with self.path.open("rb") as file:
                file.seek(self._start + self._offsets[name])
                done = 0
                while done < len(view):
                    if not (got := file.readinto(view[done:])):
                        raise self._bad(f"it ended inside {name}")
                    done += got
        except OSError as error:
            raise self._bad(str(error)) from None
        return content.view(info.dtype).reshape(info.shape)

    def _bad(self, why: str) -> ArgosyError:
        return ArgosyError(self._code, f"{self.path} is not a good safetensors file: {why}", fix=self._fix)

"""Reading a file of `torch.save`: a zip archive with a pickle, and the bytes of each storage beside it.

torch's own reader with `weights_only` has let code through twice, and reads whole tensors. Here the pickle is read as data
and gives the position of the numbers in the file; their checksum is compared, and any slice of them can be read.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from argosy.checkpoint.megatron.pickles import GlobalName, PersistentId, PickledObject, UnreadableError, read_pickle
from argosy.checkpoint.tensors import TensorInfo, read_span
from argosy.parallel.shards import Box
from argosy.untrusted import open_regular

_PIECE = 8 * 2**20  # bytes
# Size of a zip member's local header before its name, in bytes.
_LOCAL_HEADER = 30
STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
_TENSOR_NAMES = frozenset(
    [*STORAGES, "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", "collections.OrderedDict"]
)


@dataclass(frozen=True)
class Place:
    """The position of a stored value in a file, in bytes."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class StoredNumbers:
    """A tensor in an archive: its type and shape, and the byte of its first element."""

    path: Path
    info: TensorInfo
    start: int

    def read(self, box: Box) -> Tensor:
        return read_span(self.path, self.start, self.info, box)


def locate_tensor(place: Place) -> StoredNumbers:
    """Find the one tensor of an archive and compare its checksum. Raises UnreadableError or OSError."""
    with open_regular(place.path) as file:
        archive = _open(file, place)
        info, key, first = _described(read_pickle(_pickle_of(archive, 2**20), _TENSOR_NAMES.__contains__))
        member = _member(archive, f"data/{key}")
        if (first + info.numel) * info.dtype.itemsize > member.file_size:
            raise UnreadableError(f"{member.file_size:,} bytes are too few for {list(info.shape)} {info.type_name}")
        start = place.offset + _data_start(file, place, member)
        _compare_checksum(file, start, member)
    return StoredNumbers(place.path, info, start + first * info.dtype.itemsize)


def read_value(path: Path, allowed: Callable[[str], bool], limit: int) -> Any:
    """Read everything but the tensors of a `torch.save` file, as `read_pickle` returns it."""
    with open_regular(path, within=path.parent) as file:
        archive = _open(file, Place(path, 0, os.fstat(file.fileno()).st_size))
        return read_pickle(_pickle_of(archive, limit), allowed)


@contextmanager
def _archive_faults() -> Iterator[None]:
    """Convert the many exceptions of `zipfile` on broken archives to UnreadableError."""
    try:
        yield
    except UnreadableError:
        raise
    except (zipfile.BadZipFile, ValueError, LookupError, EOFError, RuntimeError, struct.error, OverflowError) as error:
        raise UnreadableError(f"no good archive of torch.save: {error}") from None


def _open(file: BinaryIO, place: Place) -> zipfile.ZipFile:
    with _archive_faults():
        return zipfile.ZipFile(_Window(file, place.offset, place.length))


def _member(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """Find a member by its name without the first part, which is the name of the archive."""
    found = [one for one in archive.infolist() if one.filename.partition("/")[2] == name]
    if len(found) != 1:
        raise UnreadableError(f"the archive has {len(found)} members {name}")
    (member,) = found
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        raise UnreadableError(f"{name} is compressed")
    return member


def _pickle_of(archive: zipfile.ZipFile, limit: int) -> bytes:
    member = _member(archive, "data.pkl")
    order = [one for one in archive.infolist() if one.filename.partition("/")[2] == "byteorder"]
    with _archive_faults():
        if order and (order[0].file_size > 16 or archive.read(order[0]) != b"little"):
            raise UnreadableError("its numbers are not little-endian")
        if member.file_size > limit:
            raise UnreadableError(f"a pickle of {member.file_size:,} bytes describes no such value")
        return archive.read(member)


def _described(value: Any) -> tuple[TensorInfo, str, int]:
    """Return (type and shape, key of the storage, index of the first element in it) of a pickled tensor."""
    if isinstance(value, PickledObject) and value.is_a("torch._utils._rebuild_parameter") and value.args:
        value = value.args[0]
    if not isinstance(value, PickledObject) or not value.is_a("torch._utils._rebuild_tensor_v2") or len(value.args) < 4:
        raise UnreadableError("it holds no plain tensor")
    storage, first, shape, stride = value.args[:4]
    kind, what, key, *_ = storage.id if isinstance(storage, PersistentId) and len(storage.id) == 5 else (None,) * 3
    if kind != "storage" or not isinstance(what, GlobalName) or what.dotted not in STORAGES or not isinstance(key, str):
        raise UnreadableError("its numbers are of no known type")
    if not all(_is_size(one) for one in (first, *shape, *stride)):
        raise UnreadableError("its shape is none")
    info = TensorInfo(STORAGES[what.dotted], tuple(shape))
    dense = torch.empty(info.shape, device="meta").stride() if info.numel else tuple(stride)
    if any(size > 1 and a != b for size, a, b in zip(shape, stride, dense, strict=True)):
        raise UnreadableError("its numbers do not lie one after another")
    return info, key, first


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48


def _data_start(file: BinaryIO, place: Place, member: zipfile.ZipInfo) -> int:
    """Return the offset of a member's data in the archive: after its header, name and extra field."""
    file.seek(place.offset + member.header_offset)
    header = file.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise UnreadableError(f"{member.filename} has no header")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    start = member.header_offset + _LOCAL_HEADER + name + extra
    if start + member.file_size > place.length:
        raise UnreadableError(f"it ends inside {member.filename}")
    return start


def _compare_checksum(file: BinaryIO, start: int, member: zipfile.ZipInfo) -> None:
    file.seek(start)
    found, left = 0, member.file_size
    while left and (piece := file.read(min(left, _PIECE))):
        found, left = zlib.crc32(piece, found), left - len(piece)
    if left or found != member.CRC:
        raise UnreadableError(f"{member.filename} has checksum {found:08x}, it was written with {member.CRC:08x}")


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if at < 0:
            raise OSError("a place before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        content = self._file.read(len(view))
        view[: len(content)] = content
        self._at += len(content)
        return len(content)

"""Writing tensors to a safetensors file, hashed on the way, and reading them back.

The format is a length, a JSON header of names, types, shapes and offsets, and the raw bytes. Tensors are written and read one
at a time: a save needs no second copy of the model, the hash no second pass over the file, and a conversion no more memory
than its largest tensor. Any slice (`Box`) of a stored tensor can be read without the rest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from operator import add
from pathlib import Path

import orjson
import torch
from torch import Tensor

from argosy.checkpoint.disk import Written, write_bytes
from argosy.errors import ArgosyError
from argosy.parallel.shards import Box, whole_box
from argosy.untrusted import open_regular

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
# The format's own limit, in bytes.
_LONGEST_HEADER = 100_000_000
# A gap below this many bytes is read along with its neighbours instead of splitting the read.
_LEAST_READ = 64 * 2**10
# Most bytes in memory beside the result.
_MOST_READ = 64 * 2**20
# Bytes of a part of a tensor that is written from a GPU.
_PART = 8 * 2**20


@dataclass(frozen=True)
class TensorInfo:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        return cls(tensor.dtype, tuple(tensor.shape))

    @classmethod
    def named(cls, dtype: str, shape: Iterable[int]) -> TensorInfo:
        """Make one from a safetensors type name. Raises KeyError for an unknown type."""
        return cls(_TYPES[dtype], tuple(shape))

    @property
    def type_name(self) -> str:
        return _NAMES[self.dtype]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    return write_stream(path, {name: TensorInfo.of(t) for name, t in tensors.items()}, tensors.__getitem__)


def write_stream(
    path: Path,
    infos: Mapping[str, TensorInfo],
    make: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write and sync a file of tensors in the order of `infos`. `make` returns each tensor when its turn comes."""

    def made(name: str, info: TensorInfo) -> Tensor:
        tensor = make(name)
        if TensorInfo.of(tensor) != info:
            raise ValueError(f"{name} was promised as {info} and made as {TensorInfo.of(tensor)}")
        return tensor

    return write_bytes(path, header_of(infos, metadata), parts_of(made(name, info) for name, info in infos.items()))


def header_of(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the file's bytes before the tensor data. The data follows in the order of `infos`, without gaps."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, info in infos.items():
        offsets = [offset, offset + info.nbytes]
        header[name] = {"dtype": info.type_name, "shape": list(info.shape), "data_offsets": offsets}
        offset += info.nbytes
    text = orjson.dumps(header)
    # Tensor data starts at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parts_of(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of tensors. Those on a GPU come in parts, of which each is valid until the next is asked for.

    No tensor is kept while the next one is made.
    """
    for flat in map(_as_bytes, tensors):
        if not _is_elsewhere(flat):
            yield flat.numpy().data
        else:
            yield from _copied_parts(flat)
        del flat


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes: its own memory if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _copied_parts(flat: Tensor) -> Iterator[memoryview]:
    """Yield copies of a tensor's parts, all in the same memory, which torch keeps for the next tensor if it is pinned."""
    memory = torch.empty(min(_PART, len(flat)), dtype=torch.uint8, pin_memory=flat.is_cuda)
    for part in flat.split(_PART):
        yield memory[: len(part)].copy_(part).numpy().data


def _is_elsewhere(tensor: Tensor) -> bool:
    """True if the CPU has no access to a tensor's memory."""
    return tensor.device.type != "cpu"


def read_tensors(path: Path) -> dict[str, Tensor]:
    file = TensorFile(path)
    return {name: file.read(name) for name in file.infos}


class TensorFile:
    """A safetensors file that is read on demand. The header is checked against the file's size.

    Args:
        code, fix: error code and fix of refusals.
        opened: the real location of the file, if `path`, which messages name, is a link.
    """

    def __init__(
        self,
        path: Path,
        *,
        code: str = "checkpoint.corrupt",
        fix: str = "use another checkpoint",
        opened: Path | None = None,
    ) -> None:
        self.path, self._code, self._fix, self._opened = path, code, fix, opened or path
        try:
            with open_regular(self._opened) as file:
                size = os.fstat(file.fileno()).st_size
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
        self._require_filled(size - self._start)

    def _add(self, name: str, dtype: str, shape: list[int], offsets: list[int]) -> None:
        if dtype not in _TYPES:
            raise self._bad(f"{name} is of type {dtype}, which is none of {', '.join(_TYPES)}")
        info = TensorInfo.named(dtype, (int(size) for size in shape))
        first, last = (int(offset) for offset in offsets)
        if first < 0 or min(info.shape, default=0) < 0 or last - first != info.nbytes:
            raise self._bad(f"{name} of shape {list(info.shape)} in {dtype} does not take bytes {first} to {last}")
        self.infos[name], self._offsets[name] = info, first

    def _require_filled(self, size: int) -> None:
        """Refuse tensors that leave gaps, overlap, or do not reach the end of the file."""
        end = 0
        for name in sorted(self.infos, key=lambda one: (self._offsets[one], self.infos[one].nbytes)):
            if self._offsets[name] != end:
                raise self._bad(f"{name} begins at byte {self._offsets[name]:,}, where byte {end:,} was next")
            end += self.infos[name].nbytes
        if end != size:
            raise self._bad(f"it has {size:,} bytes of tensors, and its header promises {end:,}")

    def read(self, name: str) -> Tensor:
        return self.read_box(name, whole_box(self.infos[name].shape))

    def read_box(self, name: str, box: Box) -> Tensor:
        """Read a slice of a tensor, in few reads that cover little else."""
        try:
            return read_span(self._opened, self._start + self._offsets[name], self.infos[name], box)
        except EOFError:
            raise self._bad(f"it ended inside {name}") from None
        except OSError as error:
            raise self._bad(str(error)) from None

    def _bad(self, why: str) -> ArgosyError:
        return ArgosyError(self._code, f"{self.path} is not a good safetensors file: {why}", fix=self._fix)


def require_finite(name: str, tensor: Tensor, code: str) -> Tensor:
    """Return the tensor. Refuses NaN and infinite weights: training, evaluation and samples would all be NaN."""
    # Models are computed in 32-bit floats at most.
    if (beyond := overflow(tensor, torch.float32)) is not None:
        raise ArgosyError(
            code,
            f"{name} {beyond}",
            fix="copy the model again, or take another one: its weights are computed with as 32-bit floats",
        )
    if not (finite := tensor.isfinite()).all():
        raise ArgosyError(
            code,
            f"{name} holds {int((~finite).sum()):,} numbers of {tensor.numel():,} that are NaN or infinite",
            fix="copy the model again, or take another one: whatever starts from these weights is NaN",
        )
    return tensor


def overflow(tensor: Tensor, dtype: torch.dtype) -> str | None:
    """Describe a finite number of a tensor that is infinite in another dtype; None if there is none."""
    floats = tensor.is_floating_point() and tensor.numel() > 0
    if not floats or torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max:
        return None
    number = max((float(end) for end in tensor.aminmax()), key=abs)
    if not math.isfinite(number) or torch.tensor(number, dtype=torch.float64).to(dtype).isfinite():
        return None
    return f"holds {number:g}, and the largest number of {dtype} is {torch.finfo(dtype).max:g}"


def read_span(path: Path, start: int, info: TensorInfo, box: Box) -> Tensor:
    """Read a slice of a tensor whose data starts at byte `start` of a file. Raises EOFError if the file is too short."""
    result = torch.empty(box.shape, dtype=info.dtype)
    shape, box, target = (info.shape, box, result) if info.shape else ((1,), Box((0,), (1,)), result.view(1))
    with open_regular(path, buffering=0) as file:
        for first, rows, inner in _spans(shape, box, info.dtype.itemsize, target):
            whole = rows.shape[1:] == inner and rows.is_contiguous()
            content = rows if whole else torch.empty(len(rows), *inner, dtype=info.dtype)
            _fill(file.fileno(), start + first * info.dtype.itemsize, content)
            if not whole:
                rows.copy_(content[(slice(None), *box.slices[len(shape) - len(inner) :])])
    return result


def _fill(file: int, at: int, content: Tensor) -> None:
    view, done = content.reshape(-1).view(torch.uint8).numpy().data, 0
    while done < len(view):
        if not (got := os.preadv(file, [view[done:]], at + done)):
            raise EOFError
        done += got


def _spans(
    shape: tuple[int, ...], box: Box, itemsize: int, target: Tensor
) -> Iterator[tuple[int, Tensor, tuple[int, ...]]]:
    """Yield the reads of a slice: index of the first element, the rows of `target` to fill, and the stored shape of a row.

    A row of the target may be a part of a stored row.
    """
    axis = len(shape) - 1
    while axis and (
        box.shape[axis] == shape[axis] or box.shape[axis] * math.prod(shape[axis + 1 :]) * itemsize < _LEAST_READ
    ):
        axis -= 1
    inner = shape[axis + 1 :]
    most = max(1, _MOST_READ // max(1, math.prod(inner) * itemsize))
    for outer in product(*(range(size) for size in box.shape[:axis])):
        for start in range(0, box.shape[axis], most):
            place = (*map(add, box.offset, outer), box.offset[axis] + start)
            yield _flat(place, shape), target[outer][start : start + most], inner


def _flat(place: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the flat index of the element, or of the first element, at these leading indices."""
    flat = 0
    for index, size in zip(place, shape, strict=False):
        flat = flat * size + index
    return flat * math.prod(shape[len(place) :])

"""A `torch_dist` checkpoint on disk: tensors are read by name and slice (`Box`), whatever layout wrote them.

`.metadata` is a pickle that says which slice of which tensor lies where; `*.distcp` files hold a `torch.save` archive for
each slice. Nothing is trusted: file names must be plain names of existing files, slices must tile their tensors, and archives
must hold the promised types and shapes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from argosy.checkpoint.megatron.archive import Place, StoredNumbers, locate_tensor
from argosy.checkpoint.megatron.pickles import GlobalName, PickledObject, UnknownNameError, UnreadableError, read_pickle
from argosy.checkpoint.tensors import TensorInfo
from argosy.errors import ArgosyError
from argosy.parallel.shards import Box, tiled
from argosy.untrusted import read_regular

METADATA = ".metadata"
# Largest .metadata, in bytes.
_LARGEST = 2**29
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.distcp")
_DCP = "torch.distributed.checkpoint"
_TENSOR, _CHUNK = f"{_DCP}.metadata.TensorStorageMetadata", f"{_DCP}.metadata.ChunkStorageMetadata"
# The module of some of these names up to torch 2.2.
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_TYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
}
_NAMES = frozenset(
    [
        *(
            f"{_DCP}.metadata.{name}"
            for name in (
                "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
            )
        ),
        *(f"{_DCP}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
        *(f"{_DCP}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        *(f"megatron.core.dist_checkpointing.strategies.torch.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
        f"{_OLD}.TensorProperties",
        f"{_OLD}.MEM_FORMAT_ENCODING",
        *_TYPES,
        "torch.int8", "torch.int16", "torch.float8_e4m3fn", "torch.float8_e5m2", "torch.complex64",
        "torch.Size", "torch.device", "torch.strided", "torch.serialization._get_layout",
        "collections.OrderedDict", "collections.defaultdict", "pathlib.PosixPath", "pathlib.Path", "builtins.getattr",
        "builtins.dict", "builtins.list", "builtins.set", "copyreg._reconstructor", "builtins.object",
    ]
)  # fmt: skip


def _known(dotted: str) -> bool:
    """Return whether the name is allowed: one of `_NAMES`, or a member of an enumeration among them."""
    return dotted in _NAMES or (dotted.startswith((_DCP, _OLD)) and dotted.rpartition(".")[0] in _NAMES)


@dataclass(frozen=True)
class _Stored:
    info: TensorInfo
    chunks: list[tuple[Box, Place]]


class TorchDist:
    """The tensors of a checkpoint. Other values (random generator states, fp8 scaling states) are skipped."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # File sizes in bytes, by name.
        self._sizes: dict[str, int] = {}
        path = directory / METADATA
        try:
            document = read_pickle(read_regular(path, _LARGEST, within=directory), _known)
        except OSError as error:
            raise self.bad(METADATA, error.strerror or str(error)) from None
        except UnreadableError as error:
            raise self.bad(METADATA, str(error)) from None
        except UnknownNameError as error:
            raise unsafe(path, str(error)) from None
        try:
            self._tensors = self._described(document)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise self.bad(METADATA, f"it does not describe a checkpoint ({type(error).__name__}: {error})") from None
        self._found: dict[Place, StoredNumbers] = {}

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return {name: one.info for name, one in self._tensors.items()}

    def read_box(self, name: str, box: Box) -> Tensor:
        """Read a slice of a tensor, from one or more files."""
        stored = self._tensors[name]
        found = [(chunk, place, both) for chunk, place in stored.chunks if (both := chunk.common(box)) is not None]
        if not tiled(box, [both for _, _, both in found]):
            raise self.bad(METADATA, f"the files do not hold every number of {name} once")
        result = None
        for chunk, place, both in found:
            part = self._numbers(name, stored.info, chunk, place)
            try:
                content = part.read(both.within(chunk))
            except (OSError, EOFError) as error:
                raise self.bad(place.path.name, str(error) or f"it ends inside {name}") from None
            if both == box:
                return content
            result = torch.empty(box.shape, dtype=stored.info.dtype) if result is None else result
            result[both.within(box).slices] = content
        return torch.empty(box.shape, dtype=stored.info.dtype) if result is None else result

    def _numbers(self, name: str, info: TensorInfo, chunk: Box, place: Place) -> StoredNumbers:
        if place not in self._found:
            try:
                found = locate_tensor(place)
            except UnknownNameError as error:
                raise unsafe(place.path, str(error)) from None
            except UnreadableError as error:
                raise self.bad(place.path.name, f"{name}: {error}") from None
            except (OSError, EOFError) as error:
                raise self.bad(place.path.name, str(error)) from None
            if found.info != TensorInfo(info.dtype, chunk.shape):
                has, want = list(found.info.shape), list(chunk.shape)
                raise self.bad(place.path.name, f"{name} is {has} {found.info.dtype}, promised {want} {info.dtype}")
            self._found[place] = found
        return self._found[place]

    def _described(self, document: Any) -> dict[str, _Stored]:
        if not isinstance(document, PickledObject) or not document.what.dotted.endswith("Metadata"):
            raise ValueError("no Metadata")
        places = {}
        for index, where in document.get("storage_data").items():
            offset = index.get("offset")
            places[index.get("fqn"), None if offset is None else _sizes(offset)] = where
        found = {}
        for name, one in document.get("state_dict_metadata").items():
            if isinstance(name, str) and one.is_a(_TENSOR):
                found[name] = self._tensor(name, one, places)
        self._require_apart([place for one in found.values() for _, place in one.chunks])
        return found

    def _require_apart(self, places: list[Place]) -> None:
        """Refuse metadata that places two slices in the same bytes."""
        places = sorted(places, key=lambda place: (place.path.name, place.offset))
        for one, after in pairwise(places):
            if one.path == after.path and one.offset + one.length > after.offset:
                raise self.bad(METADATA, f"two tensors are placed at byte {after.offset:,} of {one.path.name}")

    def _tensor(self, name: str, one: PickledObject, places: dict[Any, Any]) -> _Stored:
        properties = one.get("properties").state
        dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        shape = _sizes(one.get("size"))
        if not isinstance(dtype, GlobalName) or dtype.dotted not in _TYPES:
            raise self.bad(METADATA, f"{name} is of type {dtype.dotted if isinstance(dtype, GlobalName) else dtype}")
        chunks = []
        for chunk in one.get("chunks"):
            box = Box(_sizes(chunk.get("offsets")), _sizes(chunk.get("sizes")))
            inside = len(box.offset) == len(box.shape) == len(shape) and all(
                a + n <= size for a, n, size in zip(*box, shape, strict=True)
            )
            if not chunk.is_a(_CHUNK) or not inside:
                raise self.bad(METADATA, f"{name} has a part outside its shape {list(shape)}")
            chunks.append((box, self._place(name, places[name, box.offset])))
        return _Stored(TensorInfo(_TYPES[dtype.dotted], shape), chunks)

    def _place(self, name: str, where: PickledObject) -> Place:
        file, offset, length = where.get("relative_path"), where.get("offset"), where.get("length")
        if where.get("transform_descriptors"):
            raise self.bad(METADATA, f"{name} was stored compressed, or otherwise changed")
        if not isinstance(file, str) or _FILE.fullmatch(file) is None:
            raise self.bad(METADATA, f"{name} is placed in {file!r}, which is not the plain name of a .distcp file")
        if file not in self._sizes:
            path = self.directory / file
            if path.is_symlink() or not path.is_file():
                raise self.bad(file, "it is not there, or it is a link")
            self._sizes[file] = path.stat().st_size
        has = self._sizes[file]
        if min(*_plain(offset, length)) < 0 or offset + length > has:
            raise self.bad(file, f"{name} should end at byte {offset + length:,}, and the file has {has:,}")
        return Place(self.directory / file, offset, length)

    def bad(self, file: str, why: str) -> ArgosyError:
        return ArgosyError(
            "megatron.bad-files",
            f"{self.directory / file} cannot be used: {why}",
            fix="copy the checkpoint again, whole",
        )


def unsafe(path: Path, name: str, fix: str = "") -> ArgosyError:
    return ArgosyError(
        "megatron.unsafe",
        f"{path} names {name}, which has no place in a checkpoint; nothing of it was run",
        fix=fix or "do not open this checkpoint with anything else, and ask where it came from",
    )


def _sizes(value: Any) -> tuple[int, ...]:
    """Return a pickled torch.Size as a tuple."""
    if isinstance(value, PickledObject) and value.is_a("torch.Size"):
        (value,) = value.args
    sizes = _plain(*value)
    if any(size < 0 or size >= 2**48 for size in sizes):
        raise ValueError(f"{list(sizes)} is no shape")
    return sizes


def _plain(*values: Any) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise TypeError("a size is no whole number")
    return values

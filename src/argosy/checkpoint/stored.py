"""The tensors of a checkpoint as one mapping, however many files they are in.

One process writes whole tensors into one file. Several ranks write a file each, and `tensors.json` has the type and shape of
every tensor, and the grid of ranks that it is spread over (`rank_grid.py`). Either way, a tensor or any slice of it is read
without the rest.

    {"format": "argosy-tensors", "version": 2, "ranks": 16, "grids": [{"ranks": [[0, 8]], "cuts": [[4, 2], [2, 1]]}],
     "tensors": {"weights": {"layers.0.mlp.up.weight": {"dtype": "F32", "shape": [64, 16], "grid": 0, "dims": [0, 1], "writer": 0}}}}

Before version 2 the file listed every slice of every rank, which grows with their product. It is still read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import orjson
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from argosy.checkpoint.rank_grid import RankGrid, Spread
from argosy.checkpoint.tensors import TensorFile, TensorInfo
from argosy.errors import ArgosyError
from argosy.parallel.shards import Box, tiled, whole_box
from argosy.untrusted import MIB, read_regular

INDEX = "tensors.json"
# Largest tensors.json.
_LARGEST = 1024 * MIB
# Plain file names, so that no path can lead out of the directory.
FileName = Annotated[str, Field(pattern=r"^[a-z]{1,32}(-\d{5,8}-of-\d{5,8})?\.(safetensors|json)$")]
_Size = Annotated[int, Field(ge=0, lt=2**62)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Grid(Strict):
    ranks: list[tuple[_Size, _Size]]
    cuts: list[tuple[_Size, _Size]]


class _SpreadTensor(Strict):
    dtype: str
    shape: list[_Size]
    grid: _Size
    dims: list[_Size]
    writer: _Size | None


class _GridIndex(Strict):
    format: Literal["argosy-tensors"]
    version: Literal[2]
    ranks: _Size
    grids: list[_Grid]
    # By group and name.
    tensors: dict[str, dict[str, _SpreadTensor]]


class _Chunk(Strict):
    file: FileName
    offset: list[_Size]
    shape: list[_Size]


class _Tensor(Strict):
    dtype: str
    shape: list[_Size]
    chunks: list[_Chunk]


class _ChunkIndex(Strict):
    format: Literal["argosy-tensors"]
    # By group and name.
    tensors: dict[str, dict[str, _Tensor]]


def file_of(group: str, rank: int, ranks: int) -> str:
    return f"{group}.safetensors" if ranks == 1 else f"{group}-{rank:05d}-of-{ranks:05d}.safetensors"


@dataclass(frozen=True)
class SpreadTensor:
    """A tensor of several ranks: its type and shape, and which rank has which slice."""

    info: TensorInfo
    spread: Spread


Index = Mapping[str, Mapping[str, SpreadTensor]]


def index_of(tensors: Index, ranks: int) -> bytes:
    """Return the content of `tensors.json`."""
    grids: dict[RankGrid, int] = {}
    for members in tensors.values():
        for one in members.values():
            grids.setdefault(one.spread.grid, len(grids))
    listed = {
        group: {
            name: _SpreadTensor(
                dtype=one.info.type_name,
                shape=list(one.info.shape),
                grid=grids[one.spread.grid],
                dims=list(one.spread.dims),
                writer=one.spread.writer,
            )
            for name, one in members.items()
        }
        for group, members in tensors.items()
    }
    held = [_Grid(ranks=list(grid.ranges), cuts=list(grid.cuts)) for grid in grids]
    document = _GridIndex(format="argosy-tensors", version=2, ranks=ranks, grids=held, tensors=listed)
    return document.model_dump_json().encode()


def read_index(content: bytes) -> tuple[int, dict[str, dict[str, SpreadTensor]]]:
    """Return the number of ranks and the tensors of a `tensors.json` by group and name.

    Raises:
        ValueError: the file is not valid.
    """
    index = _GridIndex.model_validate_json(content)
    grids = [RankGrid(tuple(grid.ranks), tuple(grid.cuts)) for grid in index.grids]
    if any(max(last for _, last in grid.ranges) > index.ranks for grid in grids):
        raise ValueError(f"it has more than {index.ranks} ranks")
    return index.ranks, {
        group: {name: _spread(name, one, grids) for name, one in members.items()}
        for group, members in index.tensors.items()
    }


def _spread(name: str, one: _SpreadTensor, grids: list[RankGrid]) -> SpreadTensor:
    try:
        info = TensorInfo.named(one.dtype, one.shape)
        return SpreadTensor(info, Spread(info.shape, grids[one.grid], tuple(one.dims), one.writer))
    except KeyError:
        raise ValueError(f"{name} is of the unknown type {one.dtype}") from None
    except IndexError:
        raise ValueError(f"{name} is on grid {one.grid}, and there are {len(grids)}") from None


class Place(NamedTuple):
    """A tensor in its files. `chunks` returns the (file, slice) pairs that share elements with a slice."""

    info: TensorInfo
    chunks: Callable[[Box], list[tuple[str, Box]]]


class StoredTensors(Mapping[str, Tensor]):
    """A mapping of tensors by name. A tensor is read from its files when it is accessed."""

    def __init__(self, directory: Path, group: str) -> None:
        self._directory, self._group = directory, group
        self._files: dict[str, TensorFile] = {}

    @cached_property
    def _places(self) -> dict[str, Place]:
        if (self._directory / INDEX).is_file():
            return self._indexed()
        file = file_of(self._group, 0, 1)
        # Imported weights have no optimiser state.
        if not (self._directory / file).exists():
            return {}
        return {name: Place(info, partial(_whole, file, info)) for name, info in self._file(file).infos.items()}

    def _indexed(self) -> dict[str, Place]:
        try:
            content = read_regular(self._directory / INDEX, _LARGEST, within=self._directory)
            if "version" not in orjson.loads(content):
                chunks = _ChunkIndex.model_validate_json(content).tensors.get(self._group, {})
                return {
                    n: Place(_info(self._directory, n, one), partial(_listed, _boxes(one))) for n, one in chunks.items()
                }
            ranks, tensors = read_index(content)
        except ValidationError as error:
            raise _corrupt(self._directory, str(error.errors()[0]["msg"])) from None
        except (OSError, ValueError, TypeError) as error:
            raise _corrupt(self._directory, str(error)) from None
        return {
            name: Place(one.info, partial(_of_ranks, self._group, ranks, one.spread))
            for name, one in tensors.get(self._group, {}).items()
        }

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        return {name: place.info for name, place in self._places.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.read_box(name, whole_box(self.infos[name].shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def read_box(self, name: str, box: Box) -> Tensor:
        """Read a slice of a tensor, from one or more files."""
        info, chunks = self._places[name]
        found = [(file, chunk, common) for file, chunk in chunks(box) if (common := chunk.common(box)) is not None]
        self._require_tiled(name, box, [common for _, _, common in found])
        if len(found) == 1 and found[0][2] == box:
            file, chunk, _ = found[0]
            return self._read(file, name, chunk, box)
        result = torch.empty(box.shape, dtype=info.dtype)
        for file, chunk, common in found:
            result[common.within(box).slices] = self._read(file, name, chunk, common)
        return result

    def check(self) -> None:
        """Refuse if a tensor is not complete. Reads file headers only."""
        for name, (info, chunks) in self._places.items():
            found = chunks(whole_box(info.shape))
            self._require_tiled(name, whole_box(info.shape), [box for _, box in found])
            for file, box in found:
                self._require_there(file, name, box)

    def _read(self, file: str, name: str, chunk: Box, box: Box) -> Tensor:
        return self._file(file).read_box(self._require_there(file, name, chunk), box.within(chunk))

    def _require_there(self, file: str, name: str, chunk: Box) -> str:
        """Return the key of a slice in its file. Refuses if the file does not hold it."""
        key = key_of(name, chunk, self.infos[name])
        if self._file(file).infos.get(key) != TensorInfo(self.infos[name].dtype, chunk.shape):
            raise _corrupt(self._directory, f"{file} does not hold {key} as promised")
        return key

    def _require_tiled(self, name: str, box: Box, parts: list[Box]) -> None:
        if not tiled(box, parts):
            raise _corrupt(self._directory, f"the files do not hold every number of {name} once")

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self._directory / name)
        return self._files[name]


def _whole(file: str, info: TensorInfo, _: Box) -> list[tuple[str, Box]]:
    return [(file, whole_box(info.shape))]


def _listed(chunks: list[tuple[str, Box]], _: Box) -> list[tuple[str, Box]]:
    return chunks


def _of_ranks(group: str, ranks: int, spread: Spread, wanted: Box) -> list[tuple[str, Box]]:
    return [(file_of(group, rank, ranks), box) for rank, box in spread.chunks(wanted)]


def _info(directory: Path, name: str, one: _Tensor) -> TensorInfo:
    try:
        return TensorInfo.named(one.dtype, one.shape)
    except KeyError:
        raise _corrupt(directory, f"{name} is of the unknown type {one.dtype}") from None


def _boxes(one: _Tensor) -> list[tuple[str, Box]]:
    rank = len(one.shape)
    boxes = [(chunk.file, Box(tuple(chunk.offset), tuple(chunk.shape))) for chunk in one.chunks]
    return [(file, box) for file, box in boxes if len(box.offset) == len(box.shape) == rank]


def _corrupt(directory: Path, why: str) -> ArgosyError:
    return ArgosyError("checkpoint.corrupt", f"{directory / INDEX}: {why}", fix="use another checkpoint")


def key_of(name: str, box: Box, info: TensorInfo) -> str:
    """Return the name of a slice in its file: the tensor's name, with the index ranges if it is not the whole tensor."""
    if box == whole_box(info.shape):
        return name
    return f"{name}[{','.join(f'{first}:{first + size}' for first, size in zip(*box, strict=True))}]"

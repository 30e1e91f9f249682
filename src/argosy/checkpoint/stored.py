"""The tensors of a checkpoint as one mapping, however many files they are in.

One process writes whole tensors into one file. Several ranks write a file each, and `tensors.json` lists the type and shape
of every tensor, and which file has which slice (`Box`) of it. Either way, a tensor or any slice of it is read without the
rest.

`make_plan` makes the save plan: each element of the state is written once, by a rank that holds it, and the ranks write equal amounts.

Ranks send the first rank the slices (`Box`) that they hold of each tensor. A slice that several ranks hold is written by the
one with the least to write so far; a large one is split among its holders. The plan needs no knowledge of mesh axes:
replicas, shards, pipeline stages, and tied weights of two stages are all the same case. It is made once in a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import add
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from argosy.checkpoint.tensors import TensorFile, TensorInfo
from argosy.errors import ArgosyError
from argosy.parallel.host_group import HostGroup
from argosy.parallel.shards import Box, held_boxes, local, tiled, whole_box
from argosy.untrusted import MIB, read_regular

INDEX = "tensors.json"
# Largest tensors.json.
_LARGEST = 1024 * MIB
# Plain file names, so that no path can lead out of the directory.
FileName = Annotated[str, Field(pattern=r"^[a-z]{1,32}(-\d{5,8}-of-\d{5,8})?\.(safetensors|json)$")]
_Size = Annotated[int, Field(ge=0, lt=2**62)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Chunk(Strict):
    file: FileName
    offset: list[_Size]
    shape: list[_Size]


class _Tensor(Strict):
    dtype: str
    shape: list[_Size]
    chunks: list[_Chunk]


class _Index(Strict):
    format: Literal["argosy-tensors"]
    # By group and name.
    tensors: dict[str, dict[str, _Tensor]]


def file_of(group: str, rank: int, ranks: int) -> str:
    return f"{group}.safetensors" if ranks == 1 else f"{group}-{rank:05d}-of-{ranks:05d}.safetensors"


def index_of(stored: Mapping[str, Mapping[str, Stored]], ranks: int) -> bytes:
    """Return the content of `tensors.json`."""
    tensors = {
        group: {
            name: _Tensor(
                dtype=one.info.type_name,
                shape=list(one.info.shape),
                chunks=[
                    _Chunk(file=file_of(group, rank, ranks), offset=list(box.offset), shape=list(box.shape))
                    for rank, box in one.parts
                ],
            )
            for name, one in members.items()
        }
        for group, members in stored.items()
    }
    return _Index(format="argosy-tensors", tensors=tensors).model_dump_json().encode()


class StoredTensors(Mapping[str, Tensor]):
    """A mapping of tensors by name. A tensor is read from its files when it is accessed."""

    def __init__(self, directory: Path, group: str) -> None:
        self._directory, self._group = directory, group
        self._files: dict[str, TensorFile] = {}

    @cached_property
    def _places(self) -> dict[str, tuple[TensorInfo, list[tuple[str, Box]]]]:
        """The type and shape of each tensor, and its (file, slice) pairs."""
        if (self._directory / INDEX).is_file():
            return {name: (_info(self._directory, name, one), _boxes(one)) for name, one in self._indexed().items()}
        file = file_of(self._group, 0, 1)
        # Imported weights have no optimiser state.
        if not (self._directory / file).exists():
            return {}
        return {name: (info, [(file, whole_box(info.shape))]) for name, info in self._file(file).infos.items()}

    def _indexed(self) -> dict[str, _Tensor]:
        try:
            index = _Index.model_validate_json(read_regular(self._directory / INDEX, _LARGEST, within=self._directory))
        except ValidationError as error:
            raise _corrupt(self._directory, str(error.errors()[0]["msg"])) from None
        except OSError as error:
            raise _corrupt(self._directory, str(error)) from None
        return index.tensors.get(self._group, {})

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        return {name: info for name, (info, _) in self._places.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.read_box(name, whole_box(self.infos[name].shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def read_box(self, name: str, box: Box) -> Tensor:
        """Read a slice of a tensor, from one or more files."""
        info, chunks = self._places[name]
        found = [(file, chunk, common) for file, chunk in chunks if (common := chunk.common(box)) is not None]
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
            self._require_tiled(name, whole_box(info.shape), [box for _, box in chunks])
            for file, box in chunks:
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


# Slices from this size on are split among the ranks that hold them, in bytes.
_LARGE = 16 * 2**20

# "weights" and "optimizer": tensors by name.
Groups = Mapping[str, Mapping[str, Tensor]]


class Chunk(NamedTuple):
    """A slice of a tensor that this rank writes. `here` is its position in the rank's local part."""

    group: str
    name: str
    box: Box
    here: Box

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slice as a view of the tensor's local part."""
        return local(tensor).detach()[self.here.slices]


@dataclass(frozen=True)
class Stored:
    """One tensor of the state: the slices of it, each with the rank that writes it."""

    info: TensorInfo
    parts: list[tuple[int, Box]]


@dataclass(frozen=True)
class Plan:
    """This rank's slices. `stored` lists all tensors by group and name; only the first rank has it."""

    mine: list[Chunk]
    stored: dict[str, dict[str, Stored]] | None


def make_plan(groups: Groups, hosts: HostGroup) -> Plan:
    held = [
        [group, name, info.type_name, info.shape, [held.box for held in held_boxes(tensor)]]
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
        for info in [TensorInfo.of(tensor)]
    ]
    messages = hosts.gather(json.dumps(held).encode())
    stored = _share([json.loads(message) for message in messages]) if hosts.is_first else None
    tasks: list[list[tuple[str, str, Box]]] = [[] for _ in range(hosts.size)]
    for group, tensors in (stored or {}).items():
        for name, one in tensors.items():
            for rank, box in one.parts:
                tasks[rank].append((group, name, box))
    mine = json.loads(hosts.scatter([json.dumps(task).encode() for task in tasks] if hosts.is_first else []))
    return Plan([_chunk(groups[group][name], group, name, _box(box)) for group, name, box in mine], stored)


def _chunk(tensor: Tensor, group: str, name: str, box: Box) -> Chunk:
    held = next(held for held in held_boxes(tensor) if held.box.common(box) == box or held.box == box)
    inside = box.within(held.box)
    here = Box(tuple(map(add, held.here.offset, inside.offset)), box.shape)
    return Chunk(group, name, box, here)


def _share(claims: list[Any]) -> dict[str, dict[str, Stored]]:
    holders: dict[tuple[str, str], dict[Box, list[int]]] = {}
    stored: dict[str, dict[str, Stored]] = {}
    for rank, claim in enumerate(claims):
        for group, name, dtype, shape, boxes in claim:
            stored.setdefault(group, {}).setdefault(name, Stored(TensorInfo.named(dtype, shape), []))
            for box in boxes:
                holders.setdefault((group, name), {}).setdefault(_box(box), []).append(rank)
    pieces = [
        (box.numel * stored[group][name].info.dtype.itemsize, group, name, box, ranks)
        for (group, name), boxes in holders.items()
        for whole, ranks in _disjoint(boxes, stored[group][name].info).items()
        for box in _pieces(whole, stored[group][name].info, len(ranks))
    ]
    load = [0] * len(claims)
    for size, group, name, box, ranks in sorted(pieces, key=lambda piece: -piece[0]):
        writer = min(ranks, key=lambda rank: load[rank])
        load[writer] += size
        stored[group][name].parts.append((writer, box))
    return stored


def _disjoint(boxes: dict[Box, list[int]], info: TensorInfo) -> dict[Box, list[int]]:
    """Drop slices inside larger ones, as when one pipeline stage holds a tensor whole that another holds in parts."""
    if sum(box.numel for box in boxes) > info.numel:
        kept: dict[Box, list[int]] = {}
        for box in sorted(boxes, key=lambda one: -one.numel):
            if all(box.common(other) != box for other in kept):
                kept[box] = boxes[box]
        boxes = kept
    if sum(box.numel for box in boxes) != info.numel:
        raise ValueError(f"the ranks together hold {list(boxes)} of a tensor of shape {info.shape}")
    return boxes


def _pieces(box: Box, info: TensorInfo, holders: int) -> Iterator[Box]:
    rows = box.shape[0] if box.shape else 1
    count = min(holders, rows) if box.numel * info.dtype.itemsize >= _LARGE else 1
    for part in range(count):
        first, last = rows * part // count, rows * (part + 1) // count
        yield box if count == 1 else Box((box.offset[0] + first, *box.offset[1:]), (last - first, *box.shape[1:]))


def key_of(name: str, box: Box, info: TensorInfo) -> str:
    """Return the name of a slice in its file: the tensor's name, with the index ranges if it is not the whole tensor."""
    if box == whole_box(info.shape):
        return name
    return f"{name}[{','.join(f'{first}:{first + size}' for first, size in zip(*box, strict=True))}]"


def _box(found: Any) -> Box:
    offset, shape = found
    return Box(tuple(offset), tuple(shape))

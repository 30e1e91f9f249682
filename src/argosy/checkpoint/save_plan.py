"""The save plan: each element of the state is written once, by a rank that holds it, and the ranks write equal amounts.

Ranks send the first rank the slices (`Box`) that they hold of each tensor. A slice that several ranks hold is written by the
one with the least to write so far; a large one is split among its holders. The plan needs no knowledge of mesh axes:
replicas, shards, pipeline stages, and tied weights of two stages are all the same case. It is made once in a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple

from torch import Tensor

from argosy.checkpoint.tensors import TensorInfo
from argosy.parallel.host_group import HostGroup
from argosy.parallel.shards import Box, held_boxes, local, whole_box

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

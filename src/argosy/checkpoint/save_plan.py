"""The save plan: each element of the state is written once, by a rank that holds it, and the ranks write equal amounts.

Every rank describes the tensors it holds: their names and how they are cut. Ranks of one pipeline stage say the same, so that the
descriptions are merged on their way to the first rank, and what arrives there does not grow with the number of ranks. The first rank
chooses the writers and tells all ranks the index of the checkpoint (`stored.py`), from which each finds its own slices. A cell that
several ranks hold is written by the one with the least to write so far; a large one is split among its holders. Replicas, shards,
pipeline stages, and tied weights of two stages are all the same case. The plan is made once in a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple

import numpy as np
import orjson
from torch import Tensor

from argosy.checkpoint.rank_grid import RankGrid, Spread
from argosy.checkpoint.stored import SpreadTensor, index_of, read_index
from argosy.checkpoint.tensors import TensorInfo
from argosy.parallel.host_group import HostGroup
from argosy.parallel.shards import Box, held_boxes, local, splits_of

# Cells from this size on are split among the ranks that hold them, in bytes.
_LARGE = 16 * 2**20

# "weights" and "optimizer": tensors by name.
Groups = Mapping[str, Mapping[str, Tensor]]
Ranges = list[list[int]]


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
class Plan:
    """This rank's slices, and the content of `tensors.json`."""

    mine: list[Chunk]
    index: bytes


def make_plan(groups: Groups, hosts: HostGroup) -> Plan:
    """Return the plan. A collective: every rank must call it."""
    claims = hosts.merge(claim(describe(groups), hosts.rank), merge_claims)
    index = hosts.tell(index_of(assign_writers(claims), hosts.size) if hosts.is_first else b"")
    _, tensors = read_index(index)
    mine = [
        _chunk(tensor, group, name, box)
        for group, members in groups.items()
        for name, tensor in members.items()
        for box in tensors[group][name].spread.chunks_of(hosts.rank)
    ]
    return Plan(mine, index)


def describe(groups: Groups) -> bytes:
    """Return the tensors of a rank as JSON: (group, name, type, shape, cuts) of each. Ranks of one pipeline stage return the same."""
    return orjson.dumps(
        [
            (group, name, info.type_name, info.shape, [tuple(split) for split in splits_of(tensor)])
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
            for info in [TensorInfo.of(tensor)]
        ]
    )


def claim(description: bytes, rank: int) -> bytes:
    return orjson.dumps([[description.decode(), [[rank, rank + 1]]]])


def merge_claims(messages: list[bytes]) -> bytes:
    """Join the claims of several ranks: each distinct description once, with the ranges of ranks that gave it."""
    merged: dict[str, Ranges] = {}
    for message in messages:
        for description, ranges in orjson.loads(message):
            merged.setdefault(description, []).extend(ranges)
    return orjson.dumps([[description, _joined(ranges)] for description, ranges in merged.items()])


def _joined(ranges: Ranges) -> Ranges:
    """Sort half-open ranges, and join neighbours."""
    joined: Ranges = []
    for first, last in sorted(ranges):
        if joined and joined[-1][1] >= first:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    return joined


def assign_writers(claims: bytes) -> dict[str, dict[str, SpreadTensor]]:
    """Choose who writes what, the largest tensors first."""
    found: dict[tuple[str, str], tuple[TensorInfo, dict[Any, Ranges]]] = {}
    most = 1
    for description, ranges in orjson.loads(claims):
        most = max(most, *(last for _, last in ranges))
        for group, name, dtype, shape, cuts in orjson.loads(description):
            _, holders = found.setdefault((group, name), (TensorInfo.named(dtype, shape), {}))
            holders.setdefault(tuple(map(tuple, cuts)), []).extend(ranges)
    grids: dict[Any, RankGrid] = {}
    spreads = {place: (info, _on_grid(info, holders, grids)) for place, (info, holders) in found.items()}
    load = np.zeros(most, np.int64)
    tensors: dict[str, dict[str, SpreadTensor]] = {group: {} for group, _ in spreads}
    for (group, name), (info, spread) in sorted(spreads.items(), key=lambda item: -_cell_bytes(*item[1])):
        tensors[group][name] = SpreadTensor(info, _with_writer(info, spread, load))
    return tensors


def _on_grid(info: TensorInfo, holders: dict[Any, Ranges], grids: dict[Any, RankGrid]) -> Spread:
    """Return the spread of a tensor. Where one pipeline stage holds it whole that another holds in parts, the whole is written."""
    cuts = min(holders, key=lambda found: math.prod(pieces for _, pieces, _ in found))
    ranges = tuple((first, last) for first, last in _joined(holders[cuts]))
    digits = tuple((pieces, stride) for _, pieces, stride in cuts)
    if (ranges, digits) not in grids:
        grids[ranges, digits] = RankGrid(ranges, digits)
    return Spread(info.shape, grids[ranges, digits], tuple(dim for dim, _, _ in cuts), 0)


def _cell_bytes(info: TensorInfo, spread: Spread) -> int:
    return spread.cell_numel * info.dtype.itemsize


def _with_writer(info: TensorInfo, spread: Spread, load: Any) -> Spread:
    """Choose the writer of a tensor's cells, and add their size to the load of the ranks."""
    size, holders = _cell_bytes(info, spread), spread.grid.holders
    if spread.grid.copies > 1 and size >= _LARGE:
        load[holders] += size // spread.grid.copies
        return Spread(spread.shape, spread.grid, spread.dims, None)
    writer = int(load[holders].max(axis=0).argmin())
    load[holders[:, writer]] += size
    return Spread(spread.shape, spread.grid, spread.dims, writer)


def _chunk(tensor: Tensor, group: str, name: str, box: Box) -> Chunk:
    held = next(held for held in held_boxes(tensor) if held.box.common(box) == box or held.box == box)
    inside = box.within(held.box)
    here = Box(tuple(map(add, held.here.offset, inside.offset)), box.shape)
    return Chunk(group, name, box, here)

"""Which boxes of a whole tensor this rank holds, for any placement: what is needed to save under one layout and load under
another.

A placement cuts dimensions independently, and of each dimension leaves a rank some runs of indices: one, or several where
FSDP cuts unevenly what tensor parallelism has cut before. A box is one run of every dimension.
"""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from argosy.compat import cut_indices
from argosy.parallel.shards import is_spread, local


class Box(NamedTuple):
    """Part of a tensor: where it begins, and how far it goes, in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(first, first + size) for first, size in zip(self.offset, self.shape, strict=True))

    def common(self, other: Box) -> Box | None:
        """What lies in both, or None."""
        first = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        shape = tuple(end - start for start, end in zip(first, ends, strict=True))
        return Box(first, shape) if min(shape, default=1) > 0 else None

    def within(self, outer: Box) -> Box:
        """The same box, counted from where `outer` begins."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)


class Held(NamedTuple):
    """A box of the whole tensor, and where it lies in what this rank has of it."""

    box: Box
    here: Box

    def of(self, tensor: Tensor) -> Tensor:
        """Its numbers, sharing the tensor's memory."""
        return local(tensor)[self.here.slices]


def whole_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def held_boxes(tensor: Tensor) -> list[Held]:
    """All that this rank has of a tensor; a plain tensor is all of itself."""
    shape = tuple(tensor.shape)
    if not is_spread(tensor):
        return [Held(whole_box(shape), whole_box(shape))]
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return []
    kept: list[list[tuple[int, int]]] = []
    for dim, size in enumerate(shape):
        indices = torch.arange(size)
        for axis, placement in enumerate(tensor.placements):
            indices = cut_indices(placement, dim, indices, tensor.device_mesh.size(axis), place[axis])
        kept.append(_runs(indices))
    return [_held(runs) for runs in product(*(_with_places(runs) for runs in kept))]


def _runs(indices: Tensor) -> list[tuple[int, int]]:
    """Ascending indices as (first, number) of those that follow one another."""
    if not len(indices):
        return []
    starts = [0, *((indices.diff() != 1).nonzero().flatten() + 1).tolist(), len(indices)]
    return [(int(indices[start]), end - start) for start, end in pairwise(starts)]


def _with_places(runs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first, number, place among what is kept)"""
    placed, at = [], 0
    for first, number in runs:
        placed.append((first, number, at))
        at += number
    return placed


def _held(runs: tuple[tuple[int, int, int], ...]) -> Held:
    shape = tuple(number for _, number, _ in runs)
    return Held(Box(tuple(first for first, _, _ in runs), shape), Box(tuple(at for _, _, at in runs), shape))

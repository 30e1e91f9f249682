"""Which boxes of a whole tensor this rank holds, for any placement: what is needed to save under one layout and load under
another.

Every cut leaves a rank consecutive pieces, and so a box: one run of every dimension.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from argosy.parallel.shards import cuts_of, local


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


def tiled(box: Box, parts: list[Box]) -> bool:
    """Whether parts that lie in a box hold every number of it once: parts that share some, or leave some out, would load
    whatever was in memory."""
    shared = any(a.common(b) is not None for i, a in enumerate(parts) for b in parts[:i])
    return not shared and sum(part.numel for part in parts) == box.numel


def held_boxes(tensor: Tensor) -> list[Held]:
    """All that this rank has of a tensor, if anything; a plain tensor is all of itself."""
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    for cut in cuts_of(tensor):
        offset[cut.dim] += cut.first
        shape[cut.dim] = cut.size
    box = Box(tuple(offset), tuple(shape))
    return [Held(box, whole_box(box.shape))] if box.numel or not tensor.numel() else []

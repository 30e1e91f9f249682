"""Tensors of which each rank holds a part: torch's DTensor, as storage only. What is computed with is the part itself.

`held_boxes` tells which boxes of a whole tensor this rank holds, for any placement: what is needed to save under one layout and
load under another. Every cut leaves a rank consecutive pieces, and so a box: one run of every dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
import math

from argosy.compat import gather_into, square_sum


def is_spread(tensor: Tensor) -> TypeGuard[DTensor]:
    """Without importing what makes such tensors, which takes most of a second: one process never has any."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; a plain tensor is all of itself."""
    if not is_spread(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def spread_like(part: Tensor, like: Tensor) -> Tensor:
    """What the parts of all ranks make together, laid out as `like` is."""
    if not is_spread(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. Every rank that holds a part of it has to ask at the same time."""
    if not is_spread(tensor):
        return tensor
    part = local(tensor)
    for cut in reversed(cuts_of(tensor)):
        part = _joined(part, cut)
    return part


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole `value`, laid out as `like` is, without asking the others: each has all of it."""
    for cut in cuts_of(like):
        value = value.narrow(cut.dim, cut.first, cut.size)
    return value


def with_whole(part: Tensor, like: Tensor, function: Callable[[Tensor], Tensor], *, stacked: bool = False) -> Tensor:
    """This rank's part of function(what the parts make together), for what cannot be computed part by part. What is `stacked`
    is computed for each entry of the first dimension by itself: those of other ranks are not needed."""
    cuts = [cut for cut in cuts_of(like) if cut.dim > 0 or not stacked]
    for cut in reversed(cuts):
        part = _joined(part, cut)
    value = function(part)
    for cut in cuts:
        value = value.narrow(cut.dim, cut.first, cut.size)
    return value


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors together, rounded once, to 32 bits. See `square_sum_of` for how shards count."""
    return square_sum_of(tensors).sqrt().float()


def square_sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements, in 64 bits. Tensors cut along the same axes are summed over these; the others are
    whole on every rank, and count once.

    With 32-bit sums the norm of one and the same gradient depended on how many elements a rank holds: 0.7% at 38 M elements."""
    together: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for tensor in tensors:
        together.setdefault(tuple(cut.group for cut in cuts_of(tensor)), []).append(local(tensor))
    squares = []
    for groups, parts in together.items():
        square = square_sum(parts)
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum()


class Cut(NamedTuple):
    """One dimension, `whole` long, in consecutive pieces, one for each rank along an axis; the last may be shorter, or
    empty."""

    dim: int
    whole: int
    mesh: DeviceMesh
    axis: int

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(self.axis)

    @property
    def most(self) -> int:
        return -(-self.whole // self.mesh.size(self.axis))

    @property
    def first(self) -> int:
        return min(self.mesh.get_local_rank(self.axis) * self.most, self.whole)

    @property
    def size(self) -> int:
        return min(self.most, self.whole - self.first)


def cuts_of(tensor: Tensor) -> list[Cut]:
    """How this rank's part comes about, cut after cut. FSDP's axes are the first of a mesh and cut last, what other axes
    have left. Where both cut the same dimension, torch's placement says so too, but is wrong about uneven pieces."""
    if not is_spread(tensor):
        return []
    lengths, cuts = list(tensor.shape), []
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]  # of Shard, and of its like
            cuts.append(Cut(dim, lengths[dim], tensor.device_mesh, axis))
            lengths[dim] = cuts[-1].size
    return cuts


def _joined(part: Tensor, cut: Cut) -> Tensor:
    rows = part.new_zeros(cut.most, *part.movedim(cut.dim, 0).shape[1:])
    rows[: part.shape[cut.dim]] = part.movedim(cut.dim, 0)
    every = rows.new_empty(cut.mesh.size(cut.axis) * cut.most, *rows.shape[1:])
    gather_into(every, rows, cut.group)
    return every[: cut.whole].movedim(0, cut.dim).contiguous()


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

"""Tensors of which each rank holds a shard: torch's DTensor, as storage only. Computation uses the local shard.

`held_boxes` returns the boxes of a whole tensor that this rank holds, for any placement. Checkpoints need it to save under one
layout and load under another. Every cut leaves a rank consecutive pieces, and so a box: one range of every dimension.
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
from argosy.model.ops.choice import use_kernel


def is_spread(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if a tensor is a DTensor. This does not import DTensor, which takes most of a second: one process never has any."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory. A plain tensor is returned as it is."""
    if not is_spread(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def spread_like(part: Tensor, like: Tensor) -> Tensor:
    """Return the DTensor whose shard on this rank is `part`, with the layout of `like`."""
    if not is_spread(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(tensor: Tensor) -> Tensor:
    """All-gather a whole tensor. Every rank that holds a shard of it has to call this."""
    if not is_spread(tensor):
        return tensor
    part = local(tensor)
    for cut in reversed(cuts_of(tensor)):
        part = _joined(part, cut)
    return part


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a whole `value`, with the layout of `like`, without a collective."""
    for cut in cuts_of(like):
        value = value.narrow(cut.dim, cut.first, cut.size)
    return value


def with_whole(part: Tensor, like: Tensor, function: Callable[[Tensor], Tensor], *, stacked: bool = False) -> Tensor:
    """All-gather a tensor, apply `function` to the whole, and return this rank's shard of the result.

    With `stacked`, entries of the first dimension are independent, and those of other ranks are not gathered."""
    cuts = [cut for cut in cuts_of(like) if cut.dim > 0 or not stacked]
    for cut in reversed(cuts):
        part = _joined(part, cut)
    value = function(part)
    for cut in cuts:
        value = value.narrow(cut.dim, cut.first, cut.size)
    return value


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all tensors together, rounded once, to 32 bits. `square_sum_of` says how shards count."""
    return square_sum_of(tensors).sqrt().float()


def square_sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, in 64 bits. Tensors sharded along the same axes are summed over these axes;
    the others are whole on every rank, and count once.

    With 32-bit sums the norm of the same gradient depended on how many elements a rank holds: 0.7% at 38 M elements."""
    together: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for tensor in tensors:
        together.setdefault(tuple(cut.group for cut in cuts_of(tensor)), []).append(local(tensor))
    squares = []
    for groups, parts in together.items():
        square = _square_sum(parts)
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum()


def _square_sum(parts: Sequence[Tensor]) -> Tensor:
    if not use_kernel(parts[0]):
        return square_sum(parts)
    from argosy.model.ops.kernels.square_sum_kernel import square_sum as fused

    return fused(parts)


class Cut(NamedTuple):
    """A cut of one dimension, `whole` long, into consecutive pieces, one for each rank along an axis. The last pieces may be
    shorter, or empty."""

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
    """Return the cuts that lead to this rank's shard, in order. FSDP's axes are the first of a mesh and cut last, after the
    other axes. If both cut the same dimension, torch's placement has the same order but is wrong about uneven pieces."""
    if not is_spread(tensor):
        return []
    lengths, cuts = list(tensor.shape), []
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if not placement.is_replicate():
            # Shard and its variants have `dim`.
            dim: int = placement.dim  # type: ignore[attr-defined]
            cuts.append(Cut(dim, lengths[dim], tensor.device_mesh, axis))
            lengths[dim] = cuts[-1].size
    return cuts


class Split(NamedTuple):
    """A cut as all ranks know it: the rank `r` holds piece (r // stride) % pieces."""

    dim: int
    pieces: int
    stride: int


def splits_of(tensor: Tensor) -> list[Split]:
    """Return the cuts that lead to this rank's shard, in order: the same on all ranks that hold parts of the tensor alike."""
    splits = []
    for cut in cuts_of(tensor):
        ranks = dist.get_process_group_ranks(cut.group)
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        if [rank // stride % len(ranks) for rank in ranks] != list(range(len(ranks))):
            raise AssertionError(f"the ranks {ranks} along an axis of the mesh are not a digit of their number")
        splits.append(Split(cut.dim, len(ranks), stride))
    return splits


def _joined(part: Tensor, cut: Cut) -> Tensor:
    rows = part.new_zeros(cut.most, *part.movedim(cut.dim, 0).shape[1:])
    rows[: part.shape[cut.dim]] = part.movedim(cut.dim, 0)
    every = rows.new_empty(cut.mesh.size(cut.axis) * cut.most, *rows.shape[1:])
    gather_into(every, rows, cut.group)
    return every[: cut.whole].movedim(0, cut.dim).contiguous()


class Box(NamedTuple):
    """A box of a tensor: its offset and its size in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(first, first + size) for first, size in zip(self.offset, self.shape, strict=True))

    def common(self, other: Box) -> Box | None:
        """Return the intersection of two boxes; None if it is empty."""
        first = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        shape = tuple(end - start for start, end in zip(first, ends, strict=True))
        return Box(first, shape) if min(shape, default=1) > 0 else None

    def within(self, outer: Box) -> Box:
        """Return the same box, with its offset relative to that of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)


class Held(NamedTuple):
    """A box of the whole tensor, and the same box in this rank's shard."""

    box: Box
    here: Box

    def of(self, tensor: Tensor) -> Tensor:
        """Return the values of the box, sharing the tensor's memory."""
        return local(tensor)[self.here.slices]


def whole_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def tiled(box: Box, parts: Sequence[Box]) -> bool:
    """True if the parts of a box hold every element of it exactly once. With gaps, loading would leave uninitialised memory.

    A part is compared only with those that begin before its end in the most finely cut dimension, not with all others."""
    if sum(part.numel for part in parts) != box.numel:
        return False
    dims = range(len(box.shape))
    along = max(dims, key=lambda dim: len({part.offset[dim] for part in parts}), default=0)
    begun: list[Box] = []
    for part in sorted(parts, key=lambda one: one.offset[along : along + 1]):
        begun = [one for one in begun if one.offset[along] + one.shape[along] > part.offset[along]]
        if any(one.common(part) is not None for one in begun):
            return False
        begun.append(part)
    return True


def held_boxes(tensor: Tensor) -> list[Held]:
    """Return the boxes of a tensor that this rank holds, possibly none. A plain tensor is held whole."""
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    for cut in cuts_of(tensor):
        offset[cut.dim] += cut.first
        shape[cut.dim] = cut.size
    box = Box(tuple(offset), tuple(shape))
    return [Held(box, whole_box(box.shape))] if box.numel or not tensor.numel() else []


def span_of(tensor: Tensor) -> range:
    """Return the numbers of a whole tensor, counted row by row, from the first to the last that this rank holds."""
    strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.ndim)]
    for held in held_boxes(tensor):
        first = sum(at * stride for at, stride in zip(held.box.offset, strides, strict=True))
        rest = sum((size - 1) * stride for size, stride in zip(held.box.shape, strides, strict=True))
        return range(first, first + rest + 1)
    return range(0)

"""Tensors of which each rank holds a part: torch's DTensor, as storage only. What is computed with is the part itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

from argosy.compat import total_norm


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
    with torch.no_grad():
        return tensor.full_tensor()


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole `value`, laid out as `like` is, without asking the others: each has all of it."""
    if not is_spread(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    value = value.to(device=mesh.device_type)
    return distribute_tensor(value, mesh, like.placements, src_data_rank=None).to_local()


def with_whole(part: Tensor, like: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """This rank's part of function(what the parts make together), for what cannot be computed part by part."""
    return part_of(function(whole(spread_like(part, like))), like)


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors together. Those cut along the same axes are summed over these; the others are whole on
    every rank, and count once."""
    if not any(is_spread(tensor) for tensor in tensors):
        return total_norm(tensors)
    cuts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for tensor in tensors:
        cuts.setdefault(_cut_along(tensor), []).append(local(tensor))
    squares = []
    for groups, parts in cuts.items():
        square = total_norm(parts).square()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def _cut_along(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not is_spread(tensor):
        return ()
    return tuple(
        tensor.device_mesh.get_group(axis) for axis, placement in enumerate(tensor.placements) if placement.is_shard()
    )

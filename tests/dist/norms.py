"""Norms of tensors that are spread over ranks, for the pool."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from argosy.parallel.shards import norm_of, part_of, spread_like


def spread_norm(ranks: int) -> tuple[float, float]:
    """(the norm of tensors cut by rows, by columns and not at all; the same from 64-bit sums of the whole tensors)"""
    mesh = init_device_mesh("cpu", (ranks,))
    generator = torch.Generator().manual_seed(0)
    # Rows and columns that the ranks do not divide.
    wholes = [torch.rand(shape, generator=generator) for shape in ((1001, 2048), (257, 1003), (5,))]
    cuts: list[Placement] = [Shard(0), Shard(1), Replicate()]
    parts = []
    for value, cut in zip(wholes, cuts, strict=True):
        like = DTensor.from_local(value[:0], mesh, [cut], run_check=False, shape=value.shape, stride=value.stride())
        parts.append(spread_like(part_of(value, like).contiguous(), like))
    expected = sum(float(value.double().square().sum()) for value in wholes) ** 0.5
    return float(norm_of(parts)), expected

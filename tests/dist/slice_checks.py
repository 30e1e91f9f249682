"""What a rank holds of a tensor that FSDP has cut after tensor parallelism had."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from argosy.model.layers import Linear
from argosy.parallel.cutting import cut_parameters
from argosy.parallel.shards import Box, held_boxes, local, part_of, span_of, whole


def held(dp: int, tp: int, rows: int, dim: int) -> list[Box]:
    """The boxes, once found to be what is there."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    values = torch.arange(rows * 12.0).view(rows, 12)
    layer = Linear(12, rows, bias=False)
    layer.weight = nn.Parameter(values.clone())
    cut_parameters(layer, {"weight": dim}, mesh["tp"])
    fully_shard(layer, mesh=mesh["dp"])
    weight = next(layer.parameters())
    assert torch.equal(local(weight), part_of(values, weight))
    assert torch.equal(whole(weight), values)
    here = sorted(map(int, local(weight).flatten().tolist()))
    assert span_of(weight) == (range(here[0], here[-1] + 1) if here else range(0))
    boxes = held_boxes(weight)
    assert all(torch.equal(found.of(weight), values[found.box.slices]) for found in boxes)
    return [found.box for found in boxes]

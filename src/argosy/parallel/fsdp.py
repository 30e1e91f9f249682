"""Sharded data parallelism, by torch's `fully_shard`: each rank keeps a part of every parameter, of its gradient and of the
optimiser's state; a block's parameters are gathered for its forward and backward pass, in the training precision, from
32-bit parts, which are the masters themselves.

Blocks are a unit each, and what is left (embeddings, head, last norm) is the unit of the whole model, so that tied weights
are never in two. Gradients are summed, never averaged: the optimiser divides once. What is not trained by gradients, as the
biases of experts, stays whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from argosy.compat import combined, finish_backward
from argosy.config.schema import ParallelSpec
from argosy.parallel.ep import experts_of
from argosy.parallel.mesh import Mesh
from argosy.parallel.precision import DTYPES
from argosy.parallel.shards import local


def apply_fsdp(
    model: nn.Module, blocks: Iterable[nn.Module], mesh: Mesh, parallel: ParallelSpec, precision: str
) -> None:
    """From now on the parameters are DTensors of this rank's parts."""
    policy = MixedPrecisionPolicy(
        param_dtype=None if precision == "fp32" else DTYPES[precision],
        reduce_dtype=torch.float32 if parallel.reduce == "fp32" else torch.bfloat16,
        cast_forward_inputs=False,
    )
    whole = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    shard = partial(fully_shard, mp_policy=policy, ignored_params=whole)
    if (same := mesh.along("edp")) is not None:
        place = partial(_place_experts, ranks=same.size())
        for experts in experts_of(model):
            shard(
                experts, mesh=_with_copies(same, mesh), reshard_after_forward=parallel.reshard, shard_placement_fn=place
            )
    over = _shard_mesh(mesh)
    for unit in (*blocks, model):
        shard(unit, mesh=over, reshard_after_forward=parallel.reshard and unit is not model)
    for module in units(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies, which a factor asks for


def _place_experts(parameter: nn.Parameter, ranks: int) -> Shard:
    """Experts, or where there are too few a part of each, for every rank."""
    experts, inner, *_ = local(parameter).shape
    return Shard(1) if experts % ranks and inner % ranks == 0 else Shard(0)


def units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reduce_after(model: nn.Module, *, last: bool) -> None:
    """Whether the next backward pass sums gradients over ranks: only that of a step's last micro-batch does."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)


def reduce_nothing(model: nn.Module, *, reshard: bool) -> None:
    """From now on backward passes leave gradients whole on this rank, and, unless they are to `reshard`, parameters too."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(reshard)
        model.set_requires_gradient_sync(False)


def reduce_everything(model: nn.Module) -> None:
    """Sum over ranks all gradients that were left whole."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(True)
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        finish_backward(model)


def _shard_mesh(mesh: Mesh) -> DeviceMesh:
    """Parts along dp_shard and cp, whose ranks compute with the same parameters; copies along dp_replicate."""
    parts = mesh.along("dp_shard", "cp")
    if parts is None:
        raise AssertionError("one process has nothing to shard over")
    return _with_copies(parts, mesh)


def _with_copies(parts: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    copies = mesh.along("dp_replicate")
    return parts if copies is None else combined(copies, parts)

"""Sharded data parallelism, by torch's `fully_shard`: each rank keeps a part of every parameter, of its gradient and of the
optimiser's state; a block's parameters are gathered for its forward and backward pass, in the training precision, from
32-bit parts, which are the masters themselves.

Blocks are a unit each, and what is left (embeddings, head, last norm) is the unit of the whole model, so that tied weights
are never in two. Gradients are summed, never averaged: the optimiser divides once. What is not trained by gradients, as the
biases of experts, stays whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from argosy.compat import combined, finish_backward
from argosy.config.schema import ParallelSpec
from argosy.parallel.mesh import Mesh
from argosy.parallel.precision import DTYPES


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
    over = _shard_mesh(mesh)
    for unit in (*blocks, model):
        fully_shard(
            unit, mesh=over, mp_policy=policy, reshard_after_forward=parallel.reshard and unit is not model,
            ignored_params=whole,
        )  # fmt: skip
    for module in units(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies, which a factor asks for


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
    parts, copies = mesh.along("dp_shard", "cp"), mesh.along("dp_replicate")
    if parts is None:
        raise AssertionError("one process has nothing to shard over")
    return parts if copies is None else combined(copies, parts)

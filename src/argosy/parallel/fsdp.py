"""Sharded data parallelism (FSDP), by torch's `fully_shard`.

Each rank keeps a shard of every parameter, of its gradient and of the optimiser's state. A block's parameters are all-gathered
for its forward and backward pass, in the training precision, from 32-bit shards, which are the master weights themselves. Weights
frozen beside adapters have no master weights: their shards have the training precision.

Each block is an FSDP unit. The rest (embeddings, head, last norm) is the unit of the whole model, so that tied weights are never
in two units. The all-gather of the next unit runs beside the pass of this one, and so does the reduce-scatter of the previous one in
the backward pass. Gradients are summed, never averaged: the optimiser divides once. Every micro-batch reduce-scatters them, because
gradients that wait for the last one would take the memory of the whole model on each rank; only a pipeline, which would have to gather
its stage's weights as often, keeps the gradients of its stage. Parameters that are not trained by gradients, such as the router
biases of experts, stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from argosy.compat import accumulate_in, combined, finish_backward, gathered_parameters
from argosy.config.schema import ParallelSpec
from argosy.model.moe import Experts
from argosy.parallel.ep import experts_of
from argosy.parallel.mesh import Mesh
from argosy.parallel.precision import DTYPES
from argosy.parallel.shards import local

# In the next pass, FSDP would wait for events of the one that has not ended, and take weights to be gathered that are not.
FSDP_CUT_SHORT = "with dp_shard no pass can follow one that ended midway"


def apply_fsdp(
    model: nn.Module, blocks: Iterable[nn.Module], mesh: Mesh, parallel: ParallelSpec, precision: str
) -> None:
    """Shard the model: its parameters become DTensors of which this rank holds a shard."""
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
        # A divide factor needs a pre-multiplied sum, which gloo does not have.
        module.set_force_sum_reduction_for_comms(True)
    if mesh.along("pp") is not None and policy.param_dtype is not None and policy.reduce_dtype == torch.float32:
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.register_forward_pre_hook(_sum_wide)
    # A pipeline keeps its parameters gathered, and a rank's units are not all in one pass.
    if mesh.along("pp") is None:
        # Selective recompute counts the operations of a block, and finds more of them again than before if experts, which are
        # inside of it, were gathered ahead.
        without = Experts if parallel.recompute == "selective" else ()
        prefetch_forward([unit for unit in units(model) if not isinstance(unit, without)])


def _sum_wide(unit: nn.Module, _inputs: object) -> None:
    """Let the gradients that a pipeline keeps accumulate in 32 bits, from the first. FSDP widens them after a backward pass, and would
    add those of weights in 16 bits that are computed apart from it (zbv, dualpipev)."""
    for parameter in gathered_parameters(unit):
        accumulate_in(parameter, torch.float32)


def prefetch_forward(chain: Iterable[FSDPModule]) -> None:
    """Make each unit launch the next one's all-gather before its own forward pass. The host then need not be ahead of the device
    for the two to overlap. torch does the same for the backward pass, in the order that it saw in the forward pass."""
    for unit, following in pairwise(chain):
        unit.set_modules_to_forward_prefetch([following])


def _place_experts(parameter: nn.Parameter, ranks: int) -> Shard:
    """Choose the dimension to shard: experts, or with too few experts the inner dimension of each."""
    experts, inner, *_ = local(parameter).shape
    return Shard(1) if experts % ranks and inner % ranks == 0 else Shard(0)


def units(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP units of a model, in the order of their forward passes: the whole, and each block before its experts."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reduce_copies(model: nn.Module, *, last: bool) -> None:
    """Make the next backward pass sum the shards of gradients over a sharded model's copies (HSDP) if it is the step's last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)


def free_gathered(all_units: Iterable[FSDPModule]) -> None:
    """Free the weights that a forward pass without a backward pass has left gathered: a captured pass has to gather them itself."""
    for unit in all_units:
        unit.reshard()


def reduce_nothing(model: nn.Module, *, reshard: bool) -> None:
    """Make backward passes leave gradients unreduced on this rank, and without `reshard` parameters gathered too."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(reshard)
        model.set_requires_gradient_sync(False)


def reduce_everything(model: nn.Module) -> None:
    """Sum all gradients that `reduce_nothing` left unreduced over the ranks."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(True)
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        finish_backward(model)


def _shard_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the mesh to shard over: shards along dp_shard and cp, replicas along dp_replicate."""
    parts = mesh.along("dp_shard", "cp")
    if parts is None:
        raise AssertionError("one process has nothing to shard over")
    return _with_copies(parts, mesh)


def _with_copies(parts: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    copies = mesh.along("dp_replicate")
    return parts if copies is None else combined(copies, parts)

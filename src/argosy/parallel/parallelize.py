"""The path from a run spec to an engine: all changes that a layout makes to a plain model, in one order and one place.

Models know nothing of layouts; they declare how they may be sharded (`argosy.model.sharding`). Each change keeps the names of
the parameters and the computed results. The model is on the meta device until `materialise`: a device never holds more than its
shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from argosy.config.layout import uncapturable
from argosy.config.model import NEEDS_ROWS
from argosy.config.schema import RunSpec
from argosy.model.build import build_model
from argosy.parallel.cuda_graphs import GraphMode, first_problem
from argosy.parallel.engine import Engine
from argosy.parallel.mesh import Mesh
from argosy.parallel.precision import apply_precision, choose_precision
from argosy.parallel.shards import is_spread, local, part_of
from argosy.parallel.single import SingleDevice
from argosy.parallel.transformer_blocks import DropoutSeeds, apply_compile, apply_recompute, blocks_of
from argosy.tasks.task_registry import masks_vary, task_of

# The name and the whole value of each parameter of a model.
Weights = Callable[[nn.Module], Iterable[tuple[str, Tensor]]]


def parallelize(spec: RunSpec, mesh: Mesh, *, precision: str | None = None, weights: Weights | None = None) -> Engine:
    """Build the part of the model that this rank of the mesh holds, and the engine that trains it.

    A run on one device imports no module of the others: DTensor and FSDP alone take most of a second.

    Args:
        precision: compute precision that overrides `train.precision`.
        weights: values to fill the parameters with. Without them memory stays uninitialised: a trainer fills it through the
            optimiser, which holds the 32-bit master weights, from a checkpoint or with initial values.
    """
    parallel, seed, z_loss, frozen = spec.parallel, spec.train.seed, spec.train.z_loss, spec.model.lora is not None
    pp, tp, ep, cp = (mesh.along(axis) for axis in ("pp", "tp", "ep", "cp"))
    precision = precision or choose_precision(spec.train.precision, mesh.device)

    model = build_model(spec.model, "meta")
    if pp is not None:
        from argosy.parallel.pipeline.stage_cut import cut_stages, keep_stages

        stages = cut_stages(spec.model, parallel, spec.data.seq_len)
        keep_stages(model, stages, pp.get_local_rank())
    apply_precision(model, precision, masters=mesh.has_fsdp, frozen=frozen, fp8_head=not task_of(spec).sample_losses)
    if tp is not None:
        from argosy.parallel.tensor.apply import apply_tensor_parallel

        apply_tensor_parallel(model, tp, sequence=parallel.sp)
    if ep is not None:
        from argosy.parallel.ep import apply_expert_parallel

        apply_expert_parallel(model, ep)
    if cp is not None:
        from argosy.parallel.cp import apply_context_parallel

        apply_context_parallel(model, mesh, parallel.cp_kind)
    if parallel.recompute != "none":
        apply_recompute(model, parallel.recompute)
    if parallel.compile != "off":
        apply_compile(model, parallel.compile)
    if mesh.has_fsdp:
        from argosy.parallel.fsdp import apply_fsdp

        apply_fsdp(model, blocks_of(model), mesh, parallel, precision)
    materialise(model, mesh.device, weights, frozen=frozen)
    dropout = DropoutSeeds(model, seed)
    graph = graph_mode(spec, all_graph_refusal(spec, precision, mesh))
    if pp is not None:
        from argosy.parallel.pipeline.pipeline_engine import make_pipeline

        return make_pipeline(spec, model, mesh, stages, precision, dropout)
    if mesh.devices is not None:
        from argosy.parallel.data_parallel import DataParallel

        return DataParallel(model, mesh, parallel, dropout, z_loss=z_loss, graph=graph)
    return SingleDevice(
        model, dropout, micro_batch=parallel.micro_batch, device=mesh.device, z_loss=z_loss, graph=graph
    )


@torch.no_grad()
def materialise(model: nn.Module, device: torch.device, weights: Weights | None, *, frozen: bool = False) -> None:
    """Give the parameters memory on the device and, where `weights` are given, this rank's part of each value.

    With `frozen`, only adapters are trained. Until here their base was like any parameter: FSDP keeps whole what has no gradient.
    """
    if frozen:
        from argosy.model.adapters import freeze_base

        freeze_base(model)
    _allocate(model, device)
    if weights is not None:
        parameters = dict(model.named_parameters())
        for name, value in weights(model):
            local(parameters[name]).copy_(part_of(value, parameters[name]))


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Do what `to_empty` does. For meta tensors that loads sympy, which takes a second, so only sharded ones go its way."""

    def allocated(tensor: Tensor) -> Tensor:
        if is_spread(tensor):
            return torch.empty_like(tensor, device=device)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    model._apply(allocated)


def graph_mode(spec: RunSpec, why_not: str | None) -> GraphMode | None:
    """Return what is done with passes, given why they cannot be captured. None: their kernels are launched one by one.

    Collectives in a graph are not in the flight recorder, so passes that have some are captured only if the user asks for it.
    """
    parallel = spec.parallel
    if why_not is not None or parallel.graph == "off":
        return None
    has_collectives = parallel.dp_shard * parallel.tp * parallel.cp > 1
    return "advise" if parallel.graph == "auto" and has_collectives else parallel.graph


def all_graph_refusal(spec: RunSpec, precision: str, mesh: Mesh) -> str | None:
    """Return why a rank does not capture passes, the same on all ranks; None if all of them can.

    It depends on what is installed on a rank's machine, and a rank that captures waits for the others. All ranks have to call this.
    """
    why = graph_refusal(spec, precision, mesh.device)
    if mesh.devices is None or mesh.device.type != "cuda" or spec.parallel.graph == "off":
        return why
    from argosy.parallel.host_group import all_gather_json

    return first_problem(all_gather_json(why))


def graph_refusal(spec: RunSpec, precision: str, device: torch.device) -> str | None:
    """Return why passes are not captured as CUDA graphs; None if every pass launches the same kernels, so that they can be.

    A mask that depends on the batch rules it out unless Argosy's own kernels read it: no GPU has yet shown that the others replay with
    the same bits.
    """
    parallel = spec.parallel
    if device.type != "cuda":
        return "there is no GPU"
    if parallel.graph == "off":
        return "parallel.graph is off"
    if (found := uncapturable(spec)) is not None:
        return found.why
    if spec.model.loops_over_experts(precision, parallel.tp):
        return NEEDS_ROWS
    if masks_vary(spec):
        from argosy.parallel.attention_cases import attention_backends

        if attention_backends(spec, precision, device) != {"hopper"}:
            return "the mask depends on the batch, and not all of attention is by Argosy's own kernels"
    return None

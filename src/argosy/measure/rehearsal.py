"""Building a layout of any size on this machine, with fake process groups and parameters on the meta device.

The model is built and parallelized as on a real rank, for one rank of every pipeline stage. So a layout that would be refused
there is refused here, and what each rank holds is counted, not estimated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.compat.absent_peers import fake_ranks
from argosy.config.layout import AXES, check_world, describe_layout
from argosy.config.schema import RunSpec
from argosy.parallel.mesh import EXPERT_AXES, Mesh, make_mesh
from argosy.parallel.parallelize import parallelize
from argosy.parallel.shards import local
from argosy.train.optimizer import Optimizer
from argosy.train.session import parameter_names

_GIB = 1 << 30


@dataclass(frozen=True)
class Part:
    """The state that one rank holds, like every rank of its pipeline stage.

    optimizer_bytes: including the fp32 master weights, if the parameters are not fp32 themselves.
    groups: the ranks of its process group along each axis.
    """

    rank: int
    layers: list[str]
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    groups: dict[str, list[int]]


def rehearse(spec: RunSpec, world_size: int) -> list[Part]:
    """Build one rank of every pipeline stage."""
    check_world(spec.parallel, world_size, f"--world-size {world_size}", spec.train.global_batch)
    nowhere = torch.device("meta")
    if world_size == 1:
        return [hold(spec, Mesh(nowhere))]
    parts = []
    for rank in range(0, world_size, world_size // spec.parallel.pp):
        with fake_ranks(rank, world_size):
            parts.append(hold(spec, make_mesh(spec.parallel, nowhere)))
    return parts


def hold(spec: RunSpec, mesh: Mesh) -> Part:
    """Build the model on this rank of a mesh as training does, and count what the rank holds."""
    model = parallelize(spec, mesh).model
    optimizer = Optimizer(model, spec.optim, names=parameter_names(spec) if mesh.size("pp") > 1 else None)
    names = [name for name, _ in model.named_parameters()]
    narrow = [name for name, parameter in model.named_parameters() if parameter.dtype != torch.float32]
    masters = optimizer.weights()
    state = (*(masters[name] for name in narrow), *optimizer.tensors().values())
    return Part(
        rank=mesh.rank,
        layers=sorted({_layer(name) for name in names if "layers." in name}, key=_layer_number),
        parameters=sum(local(parameter).numel() for parameter in model.parameters()),
        parameter_bytes=_bytes(model.parameters()),
        optimizer_bytes=_bytes(state),
        groups={axis: mesh.ranks_along(axis) for axis in (*AXES, *EXPERT_AXES) if mesh.size(axis) > 1},
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def _layer(name: str) -> str:
    """Return the layer of a parameter: layers.3 for layers.3.attn.qkv.weight."""
    words = name.split(".")
    return ".".join(words[: words.index("layers") + 2])


def _layer_number(name: str) -> tuple[str, int]:
    stack, _, number = name.rpartition(".")
    return stack, int(number)


def describe_rehearsal(spec: RunSpec, parts: Sequence[Part]) -> list[str]:
    """Return a line for each stage, and the process groups of its first rank."""
    lines = [f"layout  {describe_layout(spec.parallel)}: {spec.parallel.world_size:,} ranks, each:"]
    for stage, part in enumerate(parts):
        lines.append(
            f"  stage {stage}  {_span(part.layers)}, {part.parameters:,} parameters in "
            f"{part.parameter_bytes / _GIB:.2f} GiB, optimiser {part.optimizer_bytes / _GIB:.2f} GiB"
        )
        lines += [f"    {axis:12} {len(ranks):>5} ranks: {_some(ranks)}" for axis, ranks in part.groups.items()]
    return lines


def _span(layers: list[str]) -> str:
    """Return the ranges of consecutive layers. A rank of an interleaved pipeline has several."""
    runs: list[list[str]] = []
    for layer in layers:
        stack, number = _layer_number(layer)
        if runs and _layer_number(runs[-1][-1]) == (stack, number - 1):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    spans = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]} ({len(run)})" for run in runs]
    return " and ".join(spans) or "no layers"


def _some(ranks: list[int]) -> str:
    """Return the first few ranks, and the last."""
    if len(ranks) <= 6:
        return ", ".join(map(str, ranks))
    return ", ".join(map(str, ranks[:4])) + f", … {ranks[-1]}"

"""Parameters sharded over ranks, each of which computes with its own shard.

A sharded parameter is a DTensor, for storage only: reading it from its module returns this rank's shard, a plain tensor
(`argosy.model.sharding.shardable`). The gradient of the shard becomes the gradient of the DTensor's local part. Micro-batches add to
it without DTensor, whose operations took a fifth of the host's time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from argosy.compat import combined
from argosy.errors import ArgosyError
from argosy.model.ops.matmul import SUM, GradientOf, summed, takes_sums
from argosy.model.sharding import LOCAL
from argosy.parallel.shards import local, spread_like


def cut_parameters(owner: nn.Module, dims: dict[str, int], mesh: DeviceMesh) -> None:
    """Shard the named parameters along the given dimensions over a mesh of one axis. They may already be sharded over another
    axis along other dimensions."""
    over = mesh
    for name, dim in dims.items():
        before = owner._parameters[name]
        if before is None:
            continue
        _require_shardable(owner, name)
        placements = [Shard(dim)]
        here = before.detach()
        if isinstance(here, DTensor):
            over, placements = combined(mesh, here.device_mesh), [*placements, *here.placements]  # type: ignore[list-item]
            here = here.to_local()
        most = -(-before.shape[dim] // mesh.size())
        part = here.split(most, dim)[mesh.get_local_rank()].contiguous()
        spread = DTensor.from_local(part, over, placements, run_check=False, shape=before.shape, stride=before.stride())
        owner.register_parameter(name, nn.Parameter(spread, requires_grad=before.requires_grad))
    setattr(owner, LOCAL, partial(_part, over))


def _part(mesh: DeviceMesh, parameter: nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor) or (parameter.device_mesh is not mesh and parameter.device_mesh != mesh):
        # FSDP has sharded it further, and reads its own shard outside of a forward pass.
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=parameter.placements)
    part: Tensor = _Shard.apply(parameter)
    setattr(part, SUM, partial(_add, parameter))
    return part


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        # A gradient that was added to the sum, or deferred, stays None.
        ctx.set_materialize_grads(False)
        ctx.parameter = parameter
        part = local(parameter)
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [gradient], parameter = gradients, ctx.parameter
        if gradient is None or _add(parameter, partial(summed, gradient)):
            return None
        if parameter.grad is None:
            return spread_like(gradient, parameter)
        local(parameter.grad).add_(gradient)
        return None


def _add(parameter: DTensor, gradient: GradientOf) -> bool:
    """Add a gradient of this rank's shard to the sum that a parameter has in 32 bits. Return False if it has another."""
    total = None if parameter.grad is None else local(parameter.grad)
    if not takes_sums(parameter, total):
        return False
    if total is None:
        parameter.grad = spread_like(gradient(wide=True), parameter)
    else:
        gradient(total)
    return True


def _require_shardable(owner: nn.Module, name: str) -> None:
    kind = type(owner)
    if not isinstance(getattr(kind, name, None), property):
        raise ArgosyError(
            "model.undeclared",
            f"{kind.__name__}.{name} is declared to be cut over ranks, and {kind.__name__} reads the whole of it",
            fix=f'write `{name} = shardable("{name}")` in the class (argosy.model.sharding)',
        )

"""Parameters sharded over ranks, each of which computes with its own shard.

A sharded parameter is a DTensor, for storage only: reading it from its module returns this rank's shard, a plain tensor
(`argosy.model.sharding.shardable`). The gradient of the shard becomes the gradient of the DTensor's local part.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from argosy.compat import combined
from argosy.errors import ArgosyError
from argosy.model.sharding import LOCAL


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
    if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
        # FSDP has sharded it further, and reads its own shard outside of a forward pass.
        return parameter
    return parameter.to_local(grad_placements=parameter.placements)


def _require_shardable(owner: nn.Module, name: str) -> None:
    kind = type(owner)
    if not isinstance(getattr(kind, name, None), property):
        raise ArgosyError(
            "model.undeclared",
            f"{kind.__name__}.{name} is declared to be cut over ranks, and {kind.__name__} reads the whole of it",
            fix=f'write `{name} = shardable("{name}")` in the class (argosy.model.sharding)',
        )

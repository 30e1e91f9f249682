"""Parameters cut over ranks, each of which computes with its own part.

A cut parameter is a DTensor, as storage: its module hands out this rank's part, a plain tensor, whenever it is read, and the
part's gradient is that of the DTensor's part.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from argosy.compat import combined


def cut_parameters(owner: nn.Module, dims: dict[str, int], mesh: DeviceMesh) -> None:
    """Leave this rank its part of the parameters of these names, cut along these dimensions over a mesh of one axis. They may
    have been cut over another before, along other dimensions."""
    over = mesh
    for name, dim in dims.items():
        before = owner._parameters[name]
        if before is None:
            continue
        placements = [Shard(dim)]
        here = before.detach()
        if isinstance(here, DTensor):
            over, placements = combined(mesh, here.device_mesh), [*placements, *here.placements]  # type: ignore[list-item]
            here = here.to_local()
        most = -(-before.shape[dim] // mesh.size())
        part = here.split(most, dim)[mesh.get_local_rank()].contiguous()
        spread = DTensor.from_local(part, over, placements, run_check=False, shape=before.shape, stride=before.stride())
        setattr(owner, name, nn.Parameter(spread, requires_grad=before.requires_grad))
    kind: Any = type(owner)
    owner.__class__ = _reading_parts(kind, frozenset(dims), over)


@cache
def _reading_parts(cls: Any, names: frozenset[str], mesh: DeviceMesh) -> type[nn.Module]:
    """The class with attributes that are this rank's parts of the parameters of these names."""
    return type(cls.__name__, (cls,), {name: property(partial(_part, name, mesh)) for name in names})


def _part(name: str, mesh: DeviceMesh, module: nn.Module) -> Tensor | None:
    parameter = module._parameters[name]
    if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
        return parameter  # FSDP has cut it further: outside of a forward pass, it asks for its own
    return parameter.to_local(grad_placements=parameter.placements)

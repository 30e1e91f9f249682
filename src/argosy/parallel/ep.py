"""Expert parallelism: the routed experts are spread over ranks, and the rows they read travel to them and back.

Each of `ep` ranks has an equal, consecutive part of the experts. The rows of a rank's tokens lie sorted by expert, and so by
the rank that has it: they are sent in one exchange of uneven parts, sorted once more by expert where they arrive, computed by
the same grouped products, and sent back the way they came. No row is dropped or padded. The ranks are among those that have
other tokens (dp_shard x cp), so that the gradient of an expert is already the sum over the ep ranks, and FSDP has only to sum
over those that hold the same experts; these share the experts' state among them.

How many rows each rank sends to each other one is known to the routers alone. Exchanging these counts and reading them is the
one thing in a step for which the host waits for the device: once for each layer and micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from argosy.model.moe import Experts
from argosy.model.ops.permute import combine, dispatch, sort_by_expert, sort_weights
from argosy.parallel.cutting import cut_parameters
from argosy.parallel.exchange import send, swap

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows sorted by expert, their weights, where each expert's end


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Over the ranks of a mesh of one axis."""
    elsewhere = torch.compiler.disable(_elsewhere)  # which asks how many rows there are
    for experts in experts_of(model):
        cut_parameters(experts, {name: s.dim for name, s in experts.expert_parallel.items() if s.dim is not None}, mesh)
        experts.forward = partial(elsewhere, experts.forward, mesh.get_group())  # type: ignore[method-assign]


def experts_of(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def _elsewhere(compute: Compute, group: dist.ProcessGroup, rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """As `Experts.forward`, with each row computed by the rank that has its expert."""
    ranks = group.size()
    ours = offsets.diff(prepend=offsets.new_zeros(1)).view(ranks, -1)  # rows for each rank's experts
    theirs = swap(ours, group)  # rows of each rank for the experts here
    sent, received = torch.stack((ours.sum(1), theirs.sum(1))).tolist()
    arrived = send(rows, sent, received, group)
    their_weights = send(weights, sent, received, group)

    expert = torch.arange(theirs.shape[1], device=rows.device).repeat(ranks)
    expert = expert.repeat_interleave(theirs.flatten(), output_size=sum(received))
    permutation = sort_by_expert(expert[:, None], theirs.shape[1])
    done = compute(
        dispatch(arrived, permutation), sort_weights(their_weights[:, None], permutation), permutation.offsets
    )
    return send(combine(done, permutation), received, sent, group)

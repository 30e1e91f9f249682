"""Expert parallelism: the routed experts are spread over ranks, and token rows travel to them and back by all-to-all.

Each of `ep` ranks has an equal, consecutive part of the experts. The rows of a rank's tokens are sorted by expert, and so by
the rank that has the expert. One all-to-all of uneven parts sends them. The receiver sorts them by expert again, computes them
with the same grouped GEMMs, and sends them back. No row is dropped or padded. The ep ranks are part of dp_shard x cp, whose
ranks have different tokens. The gradient of an expert is therefore already the sum over the ep ranks, and FSDP sums only over
the ranks that hold the same experts and shards the experts' state over them.

The shared experts are computed while the rows are on their way to the routed ones.

Row counts per rank are known to the routers alone. Exchanging and reading these counts is the only time in a step that the host
waits for the device: once for each layer and micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from argosy.model.moe import Experts, MoE
from argosy.model.ops.permute import combine, dispatch, sort_by_expert, sort_weights
from argosy.parallel.cutting import cut_parameters
from argosy.parallel.exchange import send, send_ahead, swap

# Takes rows sorted by expert, their weights, and the end of each expert's rows.
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Spread the experts of a model over the ranks of a mesh of one axis."""
    # Row counts are data-dependent, which torch.compile cannot trace.
    elsewhere = torch.compiler.disable(_elsewhere)
    for experts in experts_of(model):
        cut_parameters(experts, {name: s.dim for name, s in experts.expert_parallel.items() if s.dim is not None}, mesh)
        experts.forward = partial(elsewhere, experts.forward, mesh.get_group())  # type: ignore[method-assign]
    for module in model.modules():
        if isinstance(module, MoE):
            module.experts_elsewhere = True


def experts_of(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def _elsewhere(
    compute: Compute,
    group: dist.ProcessGroup,
    rows: Tensor,
    weights: Tensor,
    offsets: Tensor,
    beside: Callable[[], Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `Experts.forward` with each row computed by the rank that has its expert. If there is `beside`, compute it while the rows
    travel, and return its result too."""
    ranks = group.size()
    # Row counts by rank and expert: those sent to other ranks, and those received for the experts here.
    ours = offsets.diff(prepend=offsets.new_zeros(1)).view(ranks, -1)
    theirs = swap(ours, group)
    sent, received = torch.stack((ours.sum(1), theirs.sum(1))).tolist()
    their_weights = send(weights, sent, received, group)
    flight = send_ahead(rows, sent, received, group)
    found = None if beside is None else beside()
    arrived = flight.land()

    expert = torch.arange(theirs.shape[1], device=rows.device).repeat(ranks)
    expert = expert.repeat_interleave(theirs.flatten(), output_size=sum(received))
    permutation = sort_by_expert(expert[:, None], theirs.shape[1])
    done = compute(
        dispatch(arrived, permutation), sort_weights(their_weights[:, None], permutation), permutation.offsets
    )
    returned = send(combine(done, permutation), received, sent, group)
    return returned if found is None else (returned, found)

"""Weights that several pipeline stages hold: tied embeddings, and weights that all layers of a stack share.

Each holder has the gradient of its own stage's use of the weight. Holders exchange their gradients once a step and add them in
the same order, so that the sum has the same bits everywhere and every copy gets the same update. The gradient norm counts the
first holder's copy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.compat import copy_
from argosy.parallel.pipeline.stage_cut import Stages
from argosy.parallel.shards import local


class SharedWeights:
    """The weights that this pipeline rank shares with others, whose gradients the holders sum once a step."""

    def __init__(self, model: nn.Module, stages: Stages, group: dist.ProcessGroup) -> None:
        self._group, rank = group, dist.get_rank(group)
        # The holders, and the parameters that they share.
        self._sums: list[tuple[tuple[int, ...], list[nn.Parameter]]] = []
        # Names of weights that an earlier stage holds too.
        self.copies: set[str] = set()
        parameters = dict(model.named_parameters())
        by_holders: dict[tuple[int, ...], list[str]] = {}
        for module, holders in stages.shared().items():
            names = [name for name in parameters if name.startswith(f"{module}.")]
            if rank in holders and names:
                by_holders.setdefault(holders, []).extend(names)
        # Sorted, to be in the same order on every rank: a rank may be in several sums.
        for holders, names in sorted(by_holders.items()):
            trained = [parameters[name] for name in sorted(names) if parameters[name].requires_grad]
            if trained:
                self._sums.append((holders, trained))
            if rank != holders[0]:
                self.copies.update(names)

    def sum_gradients(self) -> None:
        """Sum the gradients of shared weights over their holders, after the last micro-batch of a step."""
        for holders, parameters in self._sums:
            gradients = list(_gradients(parameters))
            total = self._sum(torch.cat([gradient.reshape(-1) for gradient in gradients]), holders)
            parts = total.split([gradient.numel() for gradient in gradients])
            copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])

    def _sum(self, mine: Tensor, holders: tuple[int, ...]) -> Tensor:
        rank = dist.get_rank(self._group)
        # Zeros, not uninitialised: in a rehearsal nothing arrives.
        all_ = {holder: mine if holder == rank else torch.zeros_like(mine) for holder in holders}
        works: list[Any] = []
        for holder, theirs in sorted(all_.items()):
            # A pair's messages are one queue on a GPU: the lower rank sends first, and the higher one receives first. In a batch of
            # messages NCCL would wait for the whole pipeline, of which the other ranks hold nothing.
            ways = [partial(dist.isend, mine, group_dst=holder), partial(dist.irecv, theirs, group_src=holder)]
            if holder != rank:
                works += [way(group=self._group) for way in (ways if rank < holder else reversed(ways))]
        for work in works:
            work.wait()
        first, *rest = all_.values()
        return sum(rest, start=first)


def _gradients(parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    for parameter in parameters:
        # This stage did not use the weight.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        yield local(parameter.grad)

"""Weights that several stages hold: tied embeddings, and what all layers of a stack share.

Each holder has the gradient of what its own stage does with the weight. Their sum is made once a step, and is the same bits on
all of them, so that every copy is updated alike. In a gradient norm the first holder's counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.compat import copy_
from argosy.parallel.pipeline.stages import Stages
from argosy.parallel.shards import local


class SharedWeights:
    def __init__(self, model: nn.Module, stages: Stages, group: dist.ProcessGroup) -> None:
        rank, everyone = dist.get_rank(group), dist.get_process_group_ranks(group)
        self._sums: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        self.copies: set[str] = set()  # names of weights that an earlier stage holds too
        parameters = dict(model.named_parameters())
        by_holders: dict[tuple[int, ...], list[str]] = {}
        for module, holders in stages.shared().items():
            names = [name for name in parameters if name.startswith(f"{module}.")]
            if rank in holders and names:
                by_holders.setdefault(holders, []).extend(names)
        for holders, names in sorted(by_holders.items()):
            ranks = [everyone[holder] for holder in sorted(holders)]
            among = group if len(ranks) == len(everyone) else dist.new_group(ranks, use_local_synchronization=True)
            self._sums.append((among, [parameters[name] for name in sorted(names)]))
            if rank != holders[0]:
                self.copies.update(names)

    def sum_gradients(self) -> None:
        """Once the gradients of the whole batch are there."""
        for group, parameters in self._sums:
            gradients = list(_gradients(parameters))
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=group)
            parts = flat.split([gradient.numel() for gradient in gradients])
            copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])


def _gradients(parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    for parameter in parameters:
        if parameter.grad is None:  # this stage had no use for it
            parameter.grad = torch.zeros_like(parameter)
        yield local(parameter.grad)

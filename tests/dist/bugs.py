"""Planted bugs: what a function of a layout does wrong in a test that has to notice."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.model.ops.permute import Permutation, sort_by_expert
from argosy.parallel.cp import Cut


def nothing(*arguments: Any, **options: Any) -> None:
    """A reduction in place is left out."""


class _Never:
    def wait(self) -> None:
        pass


def never_started(*arguments: Any) -> Any:
    """The handle of a collective that nobody launched."""
    return _Never()


def armed_in_every_pass(engine: Any, last: bool) -> None:
    """As if each micro-batch were the last of its step."""
    engine._reduction.arm()


def none_of_them(*arguments: Any, **options: Any) -> list[Any]:
    """A list that is to be worked on comes out empty."""
    return []


def unchanged(*arguments: Any) -> Any:
    """A function of its last argument gives it back as it is."""
    return arguments[-1]


def own_part_only(x: Tensor, parts: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Any:
    """Instead of the sum over ranks."""
    x.copy_(parts.chunk(group.size())[group.rank()])
    return _Never()


def unswapped_gradients(ctx: Any, *gradients: Any) -> Any:
    return gradients[0], None


def in_order_of_ranks(cut: Cut, parts: Tensor) -> Tensor:
    """A sequence whose parts are put together as if each rank had one piece of it."""
    return torch.cat(parts.unbind(), dim=-2)


def unsummed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What this rank has, instead of the sum over ranks."""
    return x.clone()


def own_share(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What this rank has for its tokens, instead of the sum over ranks."""
    return x.chunk(group.size(), 1)[group.rank()]


def own_rows_only(every: Tensor, ours: Tensor, group: dist.ProcessGroup) -> None:
    """As if the other ranks had nothing of the vocabulary."""
    every.fill_(-torch.inf)[group.rank() * 2 : group.rank() * 2 + 2] = ours


def undivided(region: Any, module: Any, arguments: Any) -> Any:
    """The router's own losses, counted once by every rank."""
    return region.enter(arguments[0]), arguments[1]


def unsent_gradients(ctx: Any, *gradients: Any) -> Any:
    """A rank keeps the gradients of the rows it was sent, as if they were of those it had sent."""
    kept = gradients[0].new_zeros(sum(ctx.sent), *gradients[0].shape[1:])
    count = min(len(kept), len(gradients[0]))
    kept[:count] = gradients[0][:count]
    return kept, None, None, None


def as_they_come(chosen: Tensor, experts: int) -> Permutation:
    """Rows left in the order they arrived in, whichever expert they are for."""
    rows = torch.arange(len(chosen), device=chosen.device)
    return Permutation(rows, rows[:, None], sort_by_expert(chosen, experts).offsets)


def without_copies(parts: Any, mesh: Any) -> Any:
    """The mesh of a sharded model that forgets its replicas."""
    return parts

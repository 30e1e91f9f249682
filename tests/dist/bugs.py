"""Planted bugs: what a function of a layout does wrong in a test that has to notice."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.parallel.cp import Cut


def nothing(*arguments: Any, **options: Any) -> None:
    """A reduction in place is left out."""


def unchanged(*arguments: Any) -> Any:
    """A function of its last argument gives it back as it is."""
    return arguments[-1]


def own_part_only(x: Tensor, parts: Tensor, group: dist.ProcessGroup) -> None:
    """Instead of the sum over ranks."""
    x.copy_(parts.chunk(group.size())[group.rank()])


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

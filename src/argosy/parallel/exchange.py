"""Collectives in the middle of a forward pass, each with the collective that its gradient needs.

The backward pass of an all-gather is a reduce-scatter, because every rank that reads a value contributes to its gradient. The
backward pass of an all-to-all is the reverse all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.compat import gather_into, passed_on, scatter_sum_into

T = TypeVar("T")


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather x: return the x of every rank in rank order, [ranks, *x.shape]."""
    parts: Tensor = _Gather.apply(x, group)
    return parts


def swap(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all of equal parts: send parts[r] to rank r, and return what each rank sent here, [ranks, ..]."""
    theirs: Tensor = _Swap.apply(parts, group)
    return theirs


def send(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all of uneven parts: send the first sent[0] rows to rank 0 and so on; return received[r] rows from each rank r, in
    rank order."""
    theirs: Tensor = _Send.apply(rows, sent, received, group)
    return theirs


def send_beside(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, compute: Callable[[], T]
) -> tuple[Tensor, T]:
    """Return `send(rows, ..)` and `compute()`, which runs while the rows travel. In the backward pass its gradients are computed while
    theirs travel: autograd takes the nodes of a forward pass in reverse order."""
    flight = _Flight(sent, received, group)
    launched = _Launch.apply(rows, flight)
    computed = compute()
    landed: Tensor = _Land.apply(launched, flight)
    return landed, computed


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = x.new_empty(group.size(), *x.shape)
        gather_into(parts.flatten(0, 1), x.contiguous(), group)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_parts = gradients[0].contiguous()
        d_x = torch.empty_like(d_parts[0])
        scatter_sum_into(d_x, d_parts.flatten(0, 1), ctx.group)
        return d_x, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _swapped(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _swapped(gradients[0], ctx.group), None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _sent(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _sent(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


class _Flight:
    """An all-to-all of uneven parts that runs between two nodes of the autograd graph, in each direction."""

    def __init__(self, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        self._there, self._back, self._group = (received, sent), (sent, received), group
        # What is sent, what arrives, and the handle.
        self._running: tuple[Tensor, Tensor, Any] | None = None

    def launch(self, rows: Tensor, *, back: bool = False) -> Tensor:
        arriving, leaving = self._back if back else self._there
        rows, theirs = rows.contiguous(), rows.new_empty(sum(arriving), *rows.shape[1:])
        work = dist.all_to_all_single(theirs, rows, arriving, leaving, group=self._group, async_op=True)
        self._running = rows, theirs, work
        return theirs

    def land(self) -> Tensor:
        if self._running is None:
            raise AssertionError("nothing was sent")
        (_, theirs, work), self._running = self._running, None
        work.wait()
        return theirs


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.launch(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.flight.land(), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launched: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.land()
        return passed_on(launched)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.flight.launch(gradients[0], back=True)
        # `_Launch` takes what arrives instead.
        return gradients[0], None


def _sent(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    theirs = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(theirs, rows.contiguous(), received, sent, group=group)
    return theirs


def _swapped(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    theirs = torch.empty_like(parts)
    dist.all_to_all_single(theirs, parts, group=group)
    return theirs

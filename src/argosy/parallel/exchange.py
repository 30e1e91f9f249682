"""Collectives in the middle of a forward pass, each with the collective that its gradient needs.

The backward pass of an all-gather is a reduce-scatter, because every rank that reads a value contributes to its gradient. The
backward pass of an all-to-all is the reverse all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.compat import filled, gather_into, passed_on, scatter_sum_into

# Launches a collective, and returns its result, which is not there yet, and its handle.
Start = Callable[[Tensor], tuple[Tensor, Any]]


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


class Flight:
    """A collective that runs beside computation: between `launch` and `land`, and in the backward pass between the same two nodes of
    the autograd graph. Autograd takes the nodes of a forward pass in reverse order, so that the gradients of what was computed
    meanwhile are computed while the gradient travels.
    """

    def __init__(self, x: Tensor, there: Start, back: Start) -> None:
        """Launch a collective on x. `there` launches it, and `back` the one that its gradient needs."""
        self._there, self._back = there, back
        # What is sent, what arrives, and the handle.
        self._running: tuple[Tensor, Tensor, Any] | None = None
        self._launched: Tensor | None = _Launch.apply(x, self)

    def land(self) -> Tensor:
        """Wait for the result, and return it. The host waits for gloo only."""
        # A tensor kept here would keep its graph, which keeps this object: only a garbage collection would free them.
        launched, self._launched = self._launched, None
        landed: Tensor = _Land.apply(launched, self)
        return landed

    def start(self, x: Tensor, *, back: bool = False) -> Tensor:
        x = x.contiguous()
        result, work = (self._back if back else self._there)(x)
        self._running = x, result, work
        return result

    def finish(self) -> Tensor:
        if self._running is None:
            raise AssertionError("nothing was launched")
        (_, result, work), self._running = self._running, None
        work.wait()
        return result


def gather_ahead(x: Tensor, group: dist.ProcessGroup) -> Flight:
    """Launch `gather(x, group)`."""
    return Flight(x, partial(_start_gather, group), partial(_start_scatter, group))


def send_ahead(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Flight:
    """Launch `send(rows, sent, received, group)`."""
    return Flight(rows, partial(_start_send, sent, received, group), partial(_start_send, received, sent, group))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = x.new_empty(group.size(), *x.shape)
        gather_into(parts.flatten(0, 1), x.contiguous(), group)
        return filled(parts)

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


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.start(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.flight.finish(), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launched: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.finish()
        return passed_on(launched)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.flight.start(gradients[0], back=True)
        # `_Launch` returns what arrives instead.
        return gradients[0], None


def _start_gather(group: dist.ProcessGroup, x: Tensor) -> tuple[Tensor, Any]:
    parts = x.new_empty(group.size(), *x.shape)
    return parts, gather_into(parts.flatten(0, 1), x, group, async_op=True)


def _start_scatter(group: dist.ProcessGroup, d_parts: Tensor) -> tuple[Tensor, Any]:
    d_x = torch.empty_like(d_parts[0])
    return d_x, scatter_sum_into(d_x, d_parts.flatten(0, 1), group, async_op=True)


def _start_send(sent: list[int], received: list[int], group: dist.ProcessGroup, rows: Tensor) -> tuple[Tensor, Any]:
    theirs = rows.new_empty(sum(received), *rows.shape[1:])
    return theirs, dist.all_to_all_single(theirs, rows, received, sent, group=group, async_op=True)


def _sent(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    theirs = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(theirs, rows.contiguous(), received, sent, group=group)
    return filled(theirs)


def _swapped(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    theirs = torch.empty_like(parts)
    dist.all_to_all_single(theirs, parts, group=group)
    return filled(theirs)

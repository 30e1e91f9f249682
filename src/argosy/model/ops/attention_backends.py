"""Attention kernels from outside torch, registered as operators.

As operators, activation checkpointing (recompute) can keep their results, and torch.compile does not trace into them. They
read heads where the projections write them, [batch, seq, heads, head_dim].
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from argosy.model.ops import flash, hopper
from argosy.model.ops.choice import stood_for
from argosy.model.ops.largest import is_wanted, transposed
from argosy.model.ops.operators import operator
from argosy.model.ops.token_sums import wants_sums


class Bounds(NamedTuple):
    """What a causal mask hides besides later keys. Neither tensor ever decreases along a sequence."""

    # The first key each query sees.
    first: Tensor  # [1 or batch, seq], 32-bit integers
    # The last query that sees each key.
    last: Tensor  # [1 or batch, seq], 32-bit integers


class Form(NamedTuple):
    """The mask and scale of a kernel call. If there are more keys than queries, the queries are the last."""

    causal: bool
    # A query sees itself and the window - 1 keys before it.
    window: int | None
    # The scale of the scores; None for 1 / sqrt(head_dim).
    scale: float | None
    # Of kernels that compute only what is within them; others take a window.
    bounds: Bounds | None = None
    # What a backward pass that is not compiled may ask for, of kernels that can: gradients that are parts of one tensor where q, k and v
    # are, their largest magnitudes noted (`argosy.model.ops.largest`), and their sums over tokens, head by head those of queries, keys and
    # values (`argosy.model.ops.token_sums`).
    beside: bool = False
    measured: bool = False
    summed: bool = False


class Kernels(Protocol):
    """A module with the kernels of both passes. Argosy's profiles find them by name."""

    def title(self) -> str:
        """Return what to call these kernels in a report."""

    def is_kernel(self, name: str) -> bool:
        """Return whether a kernel name in a profile is one of these kernels."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        """Return the result, shaped like q, and the log-sum-exp of the scores [batch, heads, seq]."""

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, form: Form
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""


KERNELS: dict[str, Kernels] = {"flash": flash, "hopper": hopper}


def attend(kernels: str, form: Form, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of q, k, v [batch, heads, seq, head_dim], computed by the named kernels."""
    out: Tensor = _Attend.apply(kernels, form, q, k, v, *(form.bounds or (None, None)))
    return out.transpose(1, 2)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: str, form: Form, q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, last: Tensor | None
    ) -> Tensor:
        out: Tensor
        out, lse = _forward(kernels, *(t.transpose(1, 2) for t in (q, k, v)), *form[:3], first, last)
        ctx.save_for_backward(q, k, v, out, lse, first, last)
        ctx.how = (kernels, *form[:3])
        eager = not torch.compiler.is_compiling()
        ctx.measured = eager and is_wanted(q)
        ctx.summed = eager and wants_sums(q, 3 * q.shape[1] * q.shape[3])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kernels, causal, window, scale = ctx.how
        q, k, v, out, lse, first, last = ctx.saved_tensors
        d_out, (q, k, v) = gradients[0], (t.transpose(1, 2) for t in (q, k, v))
        if torch.compiler.is_compiling():
            found = _backward(kernels, d_out, q, k, v, out, lse, causal, window, scale, first, last)
            return None, None, *(t.transpose(1, 2) for t in found), None, None
        form = Form(causal, window, scale, _bounds(first, last), beside=True, measured=ctx.measured, summed=ctx.summed)
        found = KERNELS[kernels].backward(d_out, q, k, v, out, lse, form)
        return None, None, *map(transposed, found), None, None


def _like_forward(kernels: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if stood_for(q.device) is not None:
        # Whoever lets the meta device stand for a GPU wants to see the launches.
        causal, window, scale, first, last = rest
        return KERNELS[kernels].forward(q, k, v, Form(causal, window, scale, _bounds(first, last)))
    batch, seq, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seq), dtype=torch.float32)


def _like_backward(
    kernels: str, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# Results are made contiguous, which they mostly are: the fake operators promise that layout to torch.compile.
@operator("attention", _like_forward)
def _forward(
    kernels: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
    first: Tensor | None,
    last: Tensor | None,
) -> tuple[Tensor, Tensor]:
    out, lse = KERNELS[kernels].forward(q, k, v, Form(causal, window, scale, _bounds(first, last)))
    return out.contiguous(), lse.contiguous()


@operator("attention_backward", _like_backward)
def _backward(
    kernels: str,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
    first: Tensor | None,
    last: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    form = Form(causal, window, scale, _bounds(first, last))
    d_q, d_k, d_v = KERNELS[kernels].backward(d_out, q, k, v, out, lse, form)
    return d_q.contiguous(), d_k.contiguous(), d_v.contiguous()


def _bounds(first: Tensor | None, last: Tensor | None) -> Bounds | None:
    return None if first is None or last is None else Bounds(first, last)


OPERATIONS = frozenset({_forward})

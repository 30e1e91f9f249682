"""Attention by kernels that torch does not have: as operators, so that recompute may keep their results and a compiler takes
them whole. They take heads where the projections leave them, [batch, seq, heads, head_dim]."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from argosy.model.ops import flash, hopper


class Kernels(Protocol):
    """What computes both passes. Where there are more keys than queries, the queries are the last; a window is of so many keys."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """(result like q, logs of the sums of exponentials [batch, heads, seq])."""

    def backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        window: int | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""


KERNELS: dict[str, Kernels] = {"flash": flash, "hopper": hopper}


def attend(
    kernels: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, scale: float | None
) -> Tensor:
    """Attention of q, k, v [batch, heads, seq, head_dim] by these kernels."""
    by_token = (t.transpose(1, 2) for t in (q, k, v))
    out: Tensor = _Attend.apply(kernels, *by_token, causal, window, scale)
    return out.transpose(1, 2)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None
    ) -> Tensor:
        out: Tensor
        out, lse = _forward(kernels, q, k, v, causal, window, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.form = (kernels, causal, window, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kernels, *form = ctx.form
        return None, *_backward(kernels, gradients[0], *ctx.saved_tensors, *form), None, None, None


# Results are contiguous, which they mostly are anyway: a compiler is told how they lie, and holds the operators to it.
@torch.library.custom_op("argosy::attention", mutates_args=())
def _forward(
    kernels: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    out, lse = KERNELS[kernels].forward(q, k, v, causal, window, scale)
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("argosy::attention_backward", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = KERNELS[kernels].backward(d_out, q, k, v, out, lse, causal, window, scale)
    return d_q.contiguous(), d_k.contiguous(), d_v.contiguous()


@_forward.register_fake
def _(kernels: str, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seq), dtype=torch.float32)


@_backward.register_fake
def _(kernels: str, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


OPERATIONS = frozenset({torch.ops.argosy.attention.default})

"""Grouped GEMM: one matmul per expert, over rows sorted by expert.

`offsets[e]` is where the rows of expert e end; they start where those of expert e - 1 end. An expert may have no rows. The
offsets stay on the device: on a GPU the kernel reads them there, without a synchronisation. With y = x w^T, for each expert,

    y  = x w^T      x [rows, in]       w [experts, out, in]
    dx = dy w       dy [rows, out]
    dw = dy^T x     [experts, out, in]

The loop over experts is the form that runs everywhere. It reads the offsets on the host, which on a GPU synchronises.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from argosy.compat import grouped_mm
from argosy.config.model import GROUPED_MULTIPLE, NEEDS_ROWS
from argosy.model.ops.matmul import now_or_later, summed
from argosy.model.ops.operators import operator


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return x weight[e]^T for the rows of each expert e."""
    y: Tensor = _GroupedLinear.apply(x, weight, offsets)
    return y


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        # The weight itself: the saved tensor may be a copy.
        ctx.weight = weight
        return _product(x, weight.transpose(1, 2), offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, offsets = ctx.saved_tensors
        d_y = gradients[0].contiguous()
        d_x = _product(d_y, weight, offsets) if ctx.needs_input_grad[0] else None
        wanted = ctx.needs_input_grad[1]
        d_weight = now_or_later(ctx.weight, partial(_gradient, d_y, x, offsets)) if wanted else None
        return d_x, d_weight, None


def _product(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Return a[rows of e] b[e] for each expert: [rows, k] and [experts, k, n] -> [rows, n]."""
    return grouped_mm(a, b, offsets) if _has_kernel(a, b) else product_loop(a, b, offsets)


def _outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Return a[rows of e]^T b[rows of e] for each expert: [rows, m] and [rows, n] -> [experts, m, n]."""
    return grouped_mm(a.t(), b, offsets) if _has_kernel(a, b) else outer_loop(a, b, offsets)


def _gradient(d_y: Tensor, x: Tensor, offsets: Tensor, total: Tensor | None = None, *, wide: bool = False) -> Tensor:
    return summed(_outer(d_y, x, offsets), total, wide=wide)


def _has_kernel(a: Tensor, b: Tensor) -> bool:
    aligned = all(size % GROUPED_MULTIPLE == 0 for size in (a.shape[-1], *b.shape[-2 if b.ndim == 3 else -1 :]))
    return a.is_cuda and len(a) > 0 and a.dtype == b.dtype == torch.bfloat16 and aligned


def _like_product(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[-1])


def _like_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


# Operators, so that torch.compile does not trace into them: group sizes are data-dependent.
@operator("grouped_product", _like_product)
def product_loop(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    out = _like_product(a, b, offsets)
    for expert, (first, end) in enumerate(_groups(offsets)):
        torch.mm(a[first:end], b[expert], out=out[first:end])
    return out


@operator("grouped_outer", _like_outer)
def outer_loop(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    out = _like_outer(a, b, offsets)
    for expert, (first, end) in enumerate(_groups(offsets)):
        torch.mm(a[first:end].t(), b[first:end], out=out[expert])
    return out


OPERATIONS = frozenset({product_loop, outer_loop})


def _groups(offsets: Tensor) -> list[tuple[int, int]]:
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(NEEDS_ROWS)
    ends: list[int] = offsets.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))

"""An MLP with matmuls in 8-bit floats, whose activation is rounded by the kernels that compute it, in both passes.

Matmul by matmul, the activation and its gradient would be written in 16 bits, read again and rounded. They are the largest tensors of
a layer: for a gated MLP that is a third of what its kernels read and write. The gate and up projections are one matmul here, whose
weights share a scale, and so is the gradient of their input.

A first pass over the inner matmul's output finds a bound of the activation, from which its scale follows (`_measure` says how close it
is). The scale of the gradient needs no pass. With d = d_y w_down, the largest magnitudes of gate and up, g and u, and norms ||.||,

    |d| <= max||row of d_y|| max||column of w_down|| <= sqrt(out) max|d_y| max||column of w_down||
    |d_up| <= |d| g,  |d_gate| <= 1.13 |d| u       |silu(x)| and |gelu(x)| are at most |x|, and no activation is steeper than 1.13
    |d_input| <= 1.13 |d|                          if it is not gated

This is usually some 2^9 too large. e5m2 has normal values over 2^30, so a gradient keeps its precision down to 2^-21 of the largest. If
one gate or up value is 10^4 times as large as the others, the bound is some 2^18 too large, and 2^-12 is left: tokens with smaller
gradients lose theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from argosy.compat import gradient_dtype, scaled_mm
from argosy.model.ops.activation import INNER
from argosy.model.ops.fp8 import FORWARD, GRADIENT, once, quantise, quantise_weights, scaled_product
from argosy.model.ops.matmul import now_or_later


def fp8_mlp(x: Tensor, kind: str, inner: Sequence[Tensor], biases: Sequence[Tensor | None], down: Tensor) -> Tensor:
    """Return activation(x inner^T + biases) down^T, by kernels only.

    Args:
        inner: the weights of the up projection, or of gate and up.
    """
    found: Tensor = _Fp8MLP.apply(x, INNER.get(kind, kind), down, *inner, *biases)
    return found


class _Fp8MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, down: Tensor, *factors: Any) -> Tensor:
        from argosy.model.ops.kernels.fp8_mlp_kernel import column_norms, rounded_activation

        inner, biases = factors[: len(factors) // 2], factors[len(factors) // 2 :]
        x8, w8, down8 = quantise(x, FORWARD), quantise_weights(*inner), quantise_weights(down)
        bias = None if biases[0] is None else torch.cat(biases)
        y = scaled_mm(x8.values, w8.values.t(), x8.scale, w8.scale, x.dtype, bias=bias, fast=True)
        a8, largest = rounded_activation(y, kind, gated=len(inner) == 2)
        out: Tensor = scaled_mm(a8.values, down8.values.t(), a8.scale, down8.scale, x.dtype, fast=True)
        ctx.save_for_backward(
            x8.transposed, x8.scale, w8.transposed, w8.scale, y, a8.transposed, a8.scale, down8.transposed, down8.scale,
            once(lambda: column_norms(down), down, what="norms"), largest,
        )  # fmt: skip
        ctx.inner, ctx.down = inner, down
        ctx.form = (x.shape, kind, None if biases[0] is None else gradient_dtype(biases[0]))
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from argosy.model.ops.kernels.fp8_mlp_kernel import gradient_scale, rounded_gradient

        x8t, x_scale, w8t, w_scale, y, a8t, a_scale, down8t, down_scale, norms, largest = ctx.saved_tensors
        shape, kind, bias_dtype = ctx.form
        wants_x, _, wants_down, *wanted = ctx.needs_input_grad
        count, dtype = len(ctx.inner), gradients[0].dtype
        d8 = quantise(gradients[0], GRADIENT)
        d_down = None
        if wants_down:
            factors = d8.transposed, a8t.t(), d8.scale, a_scale
            d_down = now_or_later(ctx.down, partial(scaled_product, factors, dtype))
        if not (wants_x or any(wanted)):
            return None, None, d_down, *(None for _ in wanted)
        d_a = scaled_mm(d8.values, down8t.t(), d8.scale, down_scale, dtype)
        scale = gradient_scale(d8, norms, largest, gated=count == 2)
        summed = bias_dtype if any(wanted[count:]) else None
        y8, sums = rounded_gradient(d_a, y, kind, scale, gated=count == 2, summed=summed)
        d_x = None
        if wants_x:
            d_x = scaled_mm(y8.values, w8t.t(), y8.scale, w_scale, dtype).view(shape)
        d_inner = [
            now_or_later(weight, partial(scaled_product, (part, x8t.t(), y8.scale, x_scale), dtype)) if want else None
            for weight, part, want in zip(ctx.inner, y8.transposed.chunk(count), wanted[:count], strict=True)
        ]
        d_biases: Sequence[Tensor | None] = [None] * count
        if sums is not None:
            d_biases = [one if want else None for one, want in zip(sums.chunk(count), wanted[count:], strict=True)]
        return d_x, None, d_down, *d_inner, *d_biases

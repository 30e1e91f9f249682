"""Matrix products of 8-bit floats.

A tensor is stored as x = scale x values, with one scale for the whole tensor, taken from its largest magnitude just before
(nothing is remembered between steps, so a resumed run has the same scales). Weights and activations are e4m3 (largest
448), gradients e5m2 (largest 57,344: less precise, wider). With y = x w^T the three products are

    y  = x w^T       x [tokens, in]       w [out, in]           along `in`
    dx = dy w        dy [tokens, out]     w^T [in, out]         along `out`
    dw = dy^T x      dy^T [out, tokens]   x^T [in, tokens]      along `tokens`

and the hardware wants both factors contiguous along the dimension it sums over: hence each tensor is kept both ways, which
one pass writes. Sums are 32-bit; only the forward product may use the faster, slightly shorter accumulation.
On a CPU the same rounding is followed by an ordinary product: what the tests run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from argosy.compat import scaled_mm
from argosy.model.ops.choice import use_kernel

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16  # every dimension of a product is a multiple of this


class Quantised(NamedTuple):
    values: Tensor  # [rows, cols]
    transposed: Tensor  # [cols, rows], contiguous
    scale: Tensor  # 0-dimensional, 32-bit: x = scale x values


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, for x [.., in] and weight [out, in]."""
    y: Tensor = _Fp8Linear.apply(x, weight, bias)
    return y


def quantise(x: Tensor, dtype: torch.dtype) -> Quantised:
    """x [rows, cols] in 8 bits, both ways."""
    if use_kernel(x):
        from argosy.model.ops.kernels.fp8 import quantise as fused

        return Quantised(*fused(x, dtype))
    largest = torch.finfo(dtype).max
    scale = (x.abs().amax().float() / largest).clamp(min=1e-30)
    values = (x.float() / scale).clamp(-largest, largest).to(dtype)
    return Quantised(values, values.t().contiguous(), scale)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x8 = quantise(x.flatten(0, -2), FORWARD)
        w8 = quantise(weight, FORWARD)
        y = scaled_mm(x8.values, w8.values.t(), x8.scale, w8.scale, x.dtype, bias=bias, fast=True)
        ctx.save_for_backward(x8.transposed, x8.scale, w8.transposed, w8.scale)
        ctx.shape, ctx.bias_dtype = x.shape, None if bias is None else bias.dtype
        out: Tensor = y.unflatten(0, x.shape[:-1])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x8t, x_scale, w8t, w_scale = ctx.saved_tensors
        d_y = gradients[0].flatten(0, -2)
        d8 = quantise(d_y, GRADIENT)
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = scaled_mm(d8.values, w8t.t(), d8.scale, w_scale, d_y.dtype).unflatten(0, ctx.shape[:-1])
        if ctx.needs_input_grad[1]:
            d_weight = scaled_mm(d8.transposed, x8t.t(), d8.scale, x_scale, d_y.dtype)
        if ctx.needs_input_grad[2]:
            d_bias = d_y.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return d_x, d_weight, d_bias

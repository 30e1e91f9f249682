"""Activations fused with the bias before them, in one pass over memory. The backward pass also sums the bias gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.compat import gradient_dtype
from argosy.model.ops.kernels.row_sums_kernel import sum_rows

# The size of a tile.
_ROWS, _COLS = 16, 256
# Tiles per program in the backward pass, over which it sums the bias gradient.
_TILES_DOWN = 16


@triton.jit
def _logistic(z):
    """Return 1 / (1 + 2^z). A division takes five instructions more."""
    root = tl.rsqrt(1.0 + tl.exp2(z))
    return root * root


@triton.jit
def _share(x, KIND: tl.constexpr):
    """Return s of silu(x) = x s, s = sigmoid(x), or of gelu_tanh(x) = x s, s = sigmoid(sqrt(8 / pi) (x + 0.044715 x^3))."""
    if KIND == "silu":
        return _logistic(-1.4426950408889634 * x)
    else:
        return _logistic(x * (-2.302208198144325 - 0.1029432395800235 * (x * x)))


@triton.jit
def activation_value(x, KIND: tl.constexpr):
    if KIND == "relu":
        # This form keeps a NaN.
        return tl.where(x < 0, 0.0, x)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return x * _share(x, KIND)


@triton.jit
def activation_slope(x, KIND: tl.constexpr):
    if KIND == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif KIND == "gelu":
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        s = _share(x, KIND)
        value = x * s
        turn = value - value * s
        if KIND == "gelu_tanh":
            turn *= 1.5957691216057308 + 0.21406444881780073 * (x * x)
        return s + turn


@triton.jit
def _forward(y, bias, out, rows, width, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    across = tl.cdiv(width, C)
    row = (tl.program_id(0) // across).to(tl.int64) * R + tl.arange(0, R)
    col = tl.program_id(0) % across * C + tl.arange(0, C)
    inside = (row < rows)[:, None] & (col < width)[None, :]
    at = row[:, None] * width + col[None, :]
    x = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, activation_value(x, KIND).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    d_out, y, bias, d_y, d_bias, rows, width, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * C + tl.arange(0, C)
    first = tl.program_id(1).to(tl.int64) * R * TILES
    total = tl.zeros((R, C), tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    for tile in tl.range(0, TILES, num_stages=3):
        row = first + tile * R + tl.arange(0, R)
        inside = (row < rows)[:, None] & (col < width)[None, :]
        at = row[:, None] * width + col[None, :]
        x = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += b
        gradient = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32) * activation_slope(x, KIND)
        if HAS_BIAS:
            total += gradient
        tl.store(d_y + at, gradient.to(d_y.dtype.element_ty), mask=inside)
    if HAS_BIAS:
        tl.store(d_bias + tl.program_id(1) * width + col, tl.sum(total, 0), mask=col < width)


class Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        y = y.contiguous()
        width = y.shape[-1]
        rows = y.numel() // width
        out = torch.empty_like(y)
        _forward[(triton.cdiv(width, _COLS) * triton.cdiv(rows, _ROWS),)](
            y, bias, out, rows, width, kind, bias is not None, _ROWS, _COLS, num_warps=4
        )
        ctx.save_for_backward(y, bias)
        ctx.form = (kind, None if bias is None else gradient_dtype(bias))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        y, bias = ctx.saved_tensors
        kind, bias_dtype = ctx.form
        width = y.shape[-1]
        rows = y.numel() // width
        chunks = triton.cdiv(rows, _ROWS * _TILES_DOWN)
        d_y = torch.empty_like(y)
        partial = torch.empty((chunks, width), dtype=torch.float32, device=y.device) if bias is not None else None
        _backward[(triton.cdiv(width, _COLS), chunks)](
            gradients[0].contiguous(), y, bias, d_y, partial, rows, width, kind, bias is not None, _ROWS, _COLS,
            _TILES_DOWN, num_warps=4,
        )  # fmt: skip
        return d_y, None if partial is None else sum_rows(partial, bias_dtype), None


@triton.jit
def _gated_forward(gate, up, out, count, KIND: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (activation_value(g, KIND) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(d_out, gate, up, d_gate, d_up, count, KIND: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < count
    d = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_gate + at, (d * u * activation_slope(g, KIND)).to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + at, (d * activation_value(g, KIND)).to(d_up.dtype.element_ty), mask=inside)


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _gated_forward[(triton.cdiv(gate.numel(), 2048),)](gate, up, out, gate.numel(), kind, 2048, num_warps=4)
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        _gated_backward[(triton.cdiv(gate.numel(), 2048),)](
            gradients[0].contiguous(), gate, up, d_gate, d_up, gate.numel(), ctx.kind, 2048, num_warps=4
        )
        return d_gate, d_up, None


@triton.jit
def _weighted_forward(gate, up, weight, out, width, KIND: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * C + tl.arange(0, C)
    inside = col < width
    g = tl.load(gate + row * width + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * width + col, mask=inside, other=0.0).to(tl.float32)
    y = activation_value(g, KIND) * u * tl.load(weight + row).to(tl.float32)
    tl.store(out + row * width + col, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_backward(d_out, gate, up, weight, d_gate, d_up, d_weight, width, KIND: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + row).to(tl.float32)
    total = tl.zeros((C,), tl.float32)
    for first in range(0, width, C):
        col = first + tl.arange(0, C)
        inside = col < width
        at = row * width + col
        d = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        value = activation_value(g, KIND)
        total += d * value * u
        tl.store(d_gate + at, (d * w * u * activation_slope(g, KIND)).to(d_gate.dtype.element_ty), mask=inside)
        tl.store(d_up + at, (d * w * value).to(d_up.dtype.element_ty), mask=inside)
    tl.store(d_weight + row, tl.sum(total, 0).to(d_weight.dtype.element_ty))


class WeightedGated(torch.autograd.Function):
    """A gated activation with a weight for each row.

    The backward pass recomputes the unweighted activation for the weight's gradient, instead of storing it.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, kind: str) -> Tensor:
        gate, up, weight = gate.contiguous(), up.contiguous(), weight.contiguous()
        rows, width = gate.shape
        out = torch.empty_like(gate)
        _weighted_forward[(rows, triton.cdiv(width, 1024))](gate, up, weight, out, width, kind, 1024, num_warps=4)
        ctx.save_for_backward(gate, up, weight)
        ctx.kind = kind
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gate, up, weight = ctx.saved_tensors
        rows, width = gate.shape
        d_gate, d_up, d_weight = torch.empty_like(gate), torch.empty_like(up), torch.empty_like(weight)
        _weighted_backward[(rows,)](
            gradients[0].contiguous(), gate, up, weight, d_gate, d_up, d_weight, width, ctx.kind, 1024, num_warps=4
        )
        return d_gate, d_up, d_weight, None

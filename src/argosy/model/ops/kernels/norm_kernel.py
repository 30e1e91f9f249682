"""The residual sum and norm in one pass over memory, and their gradients in another.

A program takes whole rows. In the backward pass few programs take many rows each, so that the sums over rows (the gradients
of the norm's weight and bias and of the added bias) stay in registers until the end. `sum_rows` adds them up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.compat import gradient_dtype
from argosy.model.ops.kernels.row_sums_kernel import bias_gradient, sum_rows
from argosy.model.ops.largest import SLOTS, note
from argosy.model.ops.token_sums import note_sums, want_sums, wants_sums

# The backward pass has at least so many programs, four for each multiprocessor of an H100 or H200, and in all at least so many warps, about
# eight. Each program notes one largest magnitude, so there are at most SLOTS programs.
_PROGRAMS, _WARPS = 528, 1024
# Rows prefetched while one is processed. Without prefetch the pass takes twice as long.
_STAGES = 3


@triton.jit
def _forward(
    x, y, y_bias, weight, bias, total, out, mean, rstd, found, width, eps,
    HAS_Y: tl.constexpr, HAS_Y_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, RMS: tl.constexpr, MEASURED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    value = tl.load(x + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y:
        value += tl.load(y + row * width + cols, mask=inside, other=0.0).to(tl.float32)
        if HAS_Y_BIAS:
            value += tl.load(y_bias + cols, mask=inside, other=0.0).to(tl.float32)
        stored = value.to(total.dtype.element_ty)
        tl.store(total + row * width + cols, stored, mask=inside)
        value = stored.to(tl.float32)
    if RMS:
        centred = value
    else:
        average = tl.sum(value, 0) / width
        tl.store(mean + row, average)
        centred = tl.where(inside, value - average, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(rstd + row, scale)
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    result = centred * scale * w
    most = tl.abs(w) * tl.sqrt(width.to(tl.float32))
    if HAS_BIAS:
        b = tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
        result += b
        most += tl.abs(b)
    tl.store(out + row * width + cols, result.to(out.dtype.element_ty), mask=inside)
    if MEASURED:
        # Of values whose mean square is at most 1, none is larger than the root of their number. Then room for rounding.
        if row == 0:
            tl.store(found, tl.max(tl.where(most == most, most, float("inf")), 0) * 1.01)


@triton.jit
def _larger(a, b):
    """Return the larger number, or NaN if one of them is NaN. This is one instruction."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _backward(
    d_out, d_total, total, weight, mean, rstd, d_x, d_weight, d_bias, d_y_bias, found, rows, width, rows_each,
    HAS_D_TOTAL: tl.constexpr, HAS_Y_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, RMS: tl.constexpr, MEASURED: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    sum_weight = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    sum_x = tl.zeros((BLOCK,), tl.float32)
    if MEASURED:
        # Of each eight neighbours, which one thread has, only the largest: all of them would take more registers than there are.
        most = tl.zeros((BLOCK // 8,), tl.float32)
    first = program.to(tl.int64) * rows_each
    for row in tl.range(first, tl.minimum(first + rows_each, rows), num_stages=STAGES):
        at = row * width + cols
        dy = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        if RMS:
            unit = value * scale
        else:
            unit = tl.where(inside, (value - tl.load(mean + row)) * scale, 0.0)
        sum_weight += dy * unit
        if HAS_BIAS:
            sum_bias += dy
        dy *= w
        gradient = dy - unit * (tl.sum(dy * unit, 0) / width)
        if not RMS:
            gradient -= tl.sum(dy, 0) / width
        gradient *= scale
        if HAS_D_TOTAL:
            gradient += tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_Y_BIAS:
            sum_x += tl.where(inside, gradient, 0.0)
        gradient = gradient.to(d_x.dtype.element_ty)
        tl.store(d_x + at, gradient, mask=inside)
        if MEASURED:
            size = tl.abs(tl.where(inside, gradient.to(tl.float32), 0.0))
            most = _larger(most, tl.reduce(tl.reshape(size, [BLOCK // 8, 8]), 1, _larger))
    if MEASURED:
        tl.store(found + program, tl.max(tl.where(most == most, most, float("inf")), 0))
    at = program * width + cols
    tl.store(d_weight + at, sum_weight, mask=inside)
    if HAS_BIAS:
        tl.store(d_bias + at, sum_bias, mask=inside)
    if HAS_Y_BIAS:
        tl.store(d_y_bias + at, sum_x, mask=inside)


class AddNorm(torch.autograd.Function):
    """Returns x + y + y_bias and its norm. Without y it returns x and its norm, which saves adding the two gradients of x.

    If `measured`, a bound of the norm and the largest magnitudes of the gradient of y are noted (`argosy.model.ops.largest`).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, y_bias: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
        rms: bool, measured: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        summed = y is None and wants_sums(x, x.shape[-1])
        x = x.contiguous()
        y = None if y is None else y.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        total = x if y is None else torch.empty_like(x)
        out = torch.empty_like(x)
        statistics = torch.empty((2, rows), dtype=torch.float32, device=x.device)
        mean, rstd = statistics[0], statistics[1]
        block = triton.next_power_of_2(width)
        found = torch.empty(1, dtype=torch.float32, device=x.device) if measured else None
        _forward[(rows,)](
            x, y, y_bias, weight, bias, total, out, mean, rstd, found, width, eps,
            y is not None, y_bias is not None, bias is not None, rms, measured, block, num_warps=_warps(block),
        )  # fmt: skip
        note(out, found)
        ctx.save_for_backward(total, weight, statistics)
        dtypes = [None if t is None else gradient_dtype(t) for t in (weight, bias, y_bias)]
        ctx.form = (rms, measured, *dtypes, y is not None, summed)
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_total, d_out = gradients
        total, weight, statistics = ctx.saved_tensors
        rms, measured, dtype, bias_dtype, y_bias_dtype, has_y, summed = ctx.form
        # Nothing reads the norm.
        if d_out is None:
            return d_total, d_total if has_y else None, None, None, None, None, None, None
        width = total.shape[-1]
        rows = total.numel() // width
        d_out = d_out.contiguous()
        d_total = None if d_total is None else d_total.contiguous()
        d_x = torch.empty_like(total)
        block = triton.next_power_of_2(width)
        warps = max(1, min(16, block // 1024))
        rows_each = triton.cdiv(rows, min(SLOTS, max(_PROGRAMS, _WARPS // warps)))
        programs = triton.cdiv(rows, rows_each)
        # The sums over rows: the norm's weight, its bias, and y's bias or that of the sum that x is, if it is wanted.
        summed = summed or y_bias_dtype is not None
        kinds = 1 + (bias_dtype is not None) + summed
        partial = torch.empty((kinds, programs, width), dtype=torch.float32, device=total.device)
        found = torch.empty(programs, dtype=torch.float32, device=total.device) if measured else None
        _backward[(programs,)](
            d_out, d_total, total, weight, statistics[0], statistics[1], d_x, partial[0], partial[min(1, kinds - 1)],
            partial[-1], found, rows, width, rows_each, d_total is not None, summed, bias_dtype is not None, rms,
            measured, block, _STAGES, num_warps=warps,
        )  # fmt: skip
        note(d_x, found)
        dtypes = {dtype, bias_dtype, y_bias_dtype} - {None}
        sums = sum_rows(partial, dtype if len(dtypes) == 1 else torch.float32)
        d_bias = None if bias_dtype is None else sums[1].to(bias_dtype)
        d_y_bias = None if y_bias_dtype is None else sums[-1].to(y_bias_dtype)
        if summed and y_bias_dtype is None:
            note_sums(d_x, sums[-1])
        return d_x, d_x if has_y else None, d_y_bias, sums[0].to(dtype), d_bias, None, None, None


@triton.jit
def _add(x, y, y_bias, out, rows, width, R: tl.constexpr, C: tl.constexpr):
    across = tl.cdiv(width, C)
    row = (tl.program_id(0) // across).to(tl.int64) * R + tl.arange(0, R)
    col = tl.program_id(0) % across * C + tl.arange(0, C)
    inside = (row < rows)[:, None] & (col < width)[None, :]
    at = row[:, None] * width + col[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(y_bias + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


class Add(torch.autograd.Function):
    """Returns x + y + y_bias. The gradient of the bias is summed by the backward pass of the norm that reads the result, if one does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, y_bias: Tensor) -> Tensor:
        x, y = x.contiguous(), y.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        out = torch.empty_like(x)
        _add[(triton.cdiv(width, 256) * triton.cdiv(rows, 16),)](x, y, y_bias, out, rows, width, 16, 256, num_warps=4)
        ctx.bias_dtype = gradient_dtype(y_bias)
        if ctx.needs_input_grad[2]:
            want_sums(out, width)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_out = gradients[0].contiguous()
        return d_out, d_out, bias_gradient(d_out, ctx.bias_dtype) if ctx.needs_input_grad[2] else None


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))

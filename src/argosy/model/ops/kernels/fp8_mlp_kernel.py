"""Kernels of the MLP in 8-bit floats (`argosy.model.ops.fp8_mlp`), which round an activation and its gradient as they compute them.

The output of the inner matmul is [rows, width], or for a gated activation [rows, 2 width]: gate, then up. Rows are a multiple of 16, as
the matmuls need them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.model.ops.fp8 import FORWARD, GRADIENT, Quantised
from argosy.model.ops.kernels.activation_kernel import activation_slope, activation_value
from argosy.model.ops.kernels.fp8_kernel import room_for, scale_of, store_scaled, store_transposed
from argosy.model.ops.kernels.row_sums_kernel import sum_rows
from argosy.model.ops.largest import SLOTS

# The size of a tile of the first pass, and of the others in quads of rows and in columns.
_MEASURED_ROWS, _MEASURED_COLS = 8, 256
_QUADS, _COLS = 16, 64
# Columns of a tile in the forward pass of an activation without a gate, which has half as much to load.
_SINGLE_COLS = 128
# The largest magnitude of an activation below zero, with some room.
_DIP = tl.constexpr(0.28)
# No activation is steeper than this.
_STEEPEST = 1.13
# What rounding may add to a bound.
_MARGIN = 1.25


@triton.jit
def _raised(most, value):
    """Return elementwise maxima. A NaN counts as infinite: a maximum would ignore it."""
    return tl.maximum(most, tl.where(value == value, value, float("inf")))


@triton.jit
def _measure(y, found, rows, width, tiles, KIND: tl.constexpr, GATED: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Find a bound of the activation's magnitudes and, if GATED, the largest magnitudes of gate and up, [3, programs].

    The activation itself would take longer to compute than its input to read. It is at most its input, and below zero at most its
    dip. One that is not gated is largest where that is, and a gated one is next to it where the gate is well above zero.
    """
    across = tl.cdiv(width, C)
    most = tl.zeros((R, C), tl.float32)
    most_gate = tl.zeros((R, C), tl.float32)
    most_up = tl.zeros((R, C), tl.float32)
    stride = width * 2 if GATED else width
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=3):
        row = (tile // across).to(tl.int64) * R + tl.arange(0, R)
        col = tile % across * C + tl.arange(0, C)
        inside = (row < rows)[:, None] & (col < width)[None, :]
        at = row[:, None] * stride + col[None, :]
        x = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        below = tl.minimum(-x, _DIP, propagate_nan=tl.PropagateNan.ALL)
        size = tl.maximum(x, below, propagate_nan=tl.PropagateNan.ALL)
        if GATED:
            u = tl.load(y + width + at, mask=inside, other=0.0).to(tl.float32)
            most = _raised(most, size * tl.abs(u))
            most_gate = _raised(most_gate, tl.abs(x))
            most_up = _raised(most_up, tl.abs(u))
        else:
            most = _raised(most, size)
    found += tl.program_id(0)
    if GATED:
        tl.store(found, tl.max(most))
        tl.store(found + tl.num_programs(0), tl.max(most_gate))
        tl.store(found + 2 * tl.num_programs(0), tl.max(most_up))
    else:
        tl.store(found, activation_value(tl.max(most), KIND))


@triton.jit
def _load(y, at, inside, width, GATED: tl.constexpr):
    """Return gate and up, or twice the input of an activation that is not gated."""
    x = tl.load(y + at, mask=inside, other=0.0)
    if GATED:
        return x, tl.load(y + width + at, mask=inside, other=0.0)
    else:
        return x, x


@triton.jit
def _activation(x, u, KIND: tl.constexpr, GATED: tl.constexpr):
    value = activation_value(x.to(tl.float32), KIND)
    return value * u.to(tl.float32) if GATED else value


@triton.jit
def _activate(
    y, found, used, values, transposed, scale, quads, width, KIND: tl.constexpr, GATED: tl.constexpr, LARGEST: tl.constexpr,
    PARTS: tl.constexpr, QUADS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    factor = scale_of(found, used, LARGEST, PARTS)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, factor)
    inverse = tl.div_rn(1.0, factor)
    quad = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    col = tl.program_id(0) * C + tl.arange(0, C)
    inside = (quad < quads)[:, None] & (col < width)[None, :]
    stride = width * 2 if GATED else width
    at = quad.to(tl.int64)[:, None] * (4 * stride) + col[None, :]
    a, e = _load(y, at, inside, width, GATED)
    b, f = _load(y, at + stride, inside, width, GATED)
    c, g = _load(y, at + 2 * stride, inside, width, GATED)
    d, h = _load(y, at + 3 * stride, inside, width, GATED)
    target = values + quad.to(tl.int64)[:, None] * (4 * width) + col[None, :]
    a = store_scaled(_activation(a, e, KIND, GATED), inverse, target, inside, LARGEST)
    b = store_scaled(_activation(b, f, KIND, GATED), inverse, target + width, inside, LARGEST)
    c = store_scaled(_activation(c, g, KIND, GATED), inverse, target + 2 * width, inside, LARGEST)
    d = store_scaled(_activation(d, h, KIND, GATED), inverse, target + 3 * width, inside, LARGEST)
    store_transposed(a, b, c, d, transposed, quad, col, quads, width, quads)


@triton.jit
def _gradients(d, x, u, inverse, target, inside, width, KIND: tl.constexpr, GATED: tl.constexpr, LARGEST: tl.constexpr):
    """Store and return the gradients of gate and up, scaled, or twice that of the input of an activation that is not gated."""
    d = d.to(tl.float32)
    x = x.to(tl.float32)
    if GATED:
        by_up = store_scaled(d * activation_value(x, KIND), inverse, target + width, inside, LARGEST)
        return store_scaled(d * u.to(tl.float32) * activation_slope(x, KIND), inverse, target, inside, LARGEST), by_up
    else:
        by_gate = store_scaled(d * activation_slope(x, KIND), inverse, target, inside, LARGEST)
        return by_gate, by_gate


@triton.jit
def _differentiate(
    d_out, y, scale, values, transposed, d_bias, quads, width, KIND: tl.constexpr, GATED: tl.constexpr, SUMMED: tl.constexpr,
    LARGEST: tl.constexpr, QUADS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    factor = tl.load(scale)
    inverse = tl.div_rn(1.0, factor)
    col = tl.program_id(0) * C + tl.arange(0, C)
    stride = width * 2 if GATED else width
    quad = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    inside = (quad < quads)[:, None] & (col < width)[None, :]
    source = d_out + quad.to(tl.int64)[:, None] * (4 * width) + col[None, :]
    at = quad.to(tl.int64)[:, None] * (4 * stride) + col[None, :]
    d_a = tl.load(source, mask=inside, other=0.0)
    d_b = tl.load(source + width, mask=inside, other=0.0)
    d_c = tl.load(source + 2 * width, mask=inside, other=0.0)
    d_d = tl.load(source + 3 * width, mask=inside, other=0.0)
    a, e = _load(y, at, inside, width, GATED)
    b, f = _load(y, at + stride, inside, width, GATED)
    c, g = _load(y, at + 2 * stride, inside, width, GATED)
    d, h = _load(y, at + 3 * stride, inside, width, GATED)
    a, e = _gradients(d_a, a, e, inverse, values + at, inside, width, KIND, GATED, LARGEST)
    b, f = _gradients(d_b, b, f, inverse, values + at + stride, inside, width, KIND, GATED, LARGEST)
    c, g = _gradients(d_c, c, g, inverse, values + at + 2 * stride, inside, width, KIND, GATED, LARGEST)
    d, h = _gradients(d_d, d, h, inverse, values + at + 3 * stride, inside, width, KIND, GATED, LARGEST)
    store_transposed(a, b, c, d, transposed, quad, col, quads, width, quads)
    if GATED:
        store_transposed(e, f, g, h, transposed + width.to(tl.int64) * (4 * quads), quad, col, quads, width, quads)
    if SUMMED:
        at = d_bias + tl.program_id(1).to(tl.int64) * stride + col
        tl.store(at, tl.sum((a + b) + (c + d), 0) * factor, mask=col < width)
        if GATED:
            tl.store(at + width, tl.sum((e + f) + (g + h), 0) * factor, mask=col < width)


@triton.jit
def _column_norms(w, found, rows, cols, R: tl.constexpr, C: tl.constexpr):
    col = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((R, C), tl.float32)
    for first in tl.range(0, rows, R, num_stages=3):
        row = first + tl.arange(0, R)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        value = tl.load(w + row.to(tl.int64)[:, None] * cols + col[None, :], mask=inside, other=0.0).to(tl.float32)
        total += value * value
    square = tl.sum(total, 0)
    tl.store(found + tl.program_id(0), tl.sqrt(tl.max(tl.where(square == square, square, float("inf")), 0)))


@triton.jit
def _bound(d_scale, norms, used, largest, measured, scale, factor, GATED: tl.constexpr, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    bound = tl.load(d_scale) * factor * tl.max(tl.load(norms + part, mask=part < used, other=0.0), 0)
    if GATED:
        gate = tl.max(tl.load(largest + measured + part, mask=part < measured, other=0.0), 0)
        up = tl.max(tl.load(largest + 2 * measured + part, mask=part < measured, other=0.0), 0)
        bound *= tl.maximum(up, gate)
    tl.store(scale, tl.maximum(bound, 1e-30, propagate_nan=tl.PropagateNan.ALL))


def rounded_activation(y: Tensor, kind: str, *, gated: bool) -> tuple[Quantised, Tensor]:
    """Return the activation of y, rounded, and what `_measure` found, [3, parts]. Without a gate only the first row is defined."""
    rows, width = y.shape[0], y.shape[1] // (1 + gated)
    tiles = triton.cdiv(rows, _MEASURED_ROWS) * triton.cdiv(width, _MEASURED_COLS)
    used = min(SLOTS, tiles)
    found = torch.empty((3, used), dtype=torch.float32, device=y.device)
    _measure[(used,)](y, found, rows, width, tiles, kind, gated, _MEASURED_ROWS, _MEASURED_COLS, num_warps=4)
    room = room_for(rows, width, FORWARD, y.device)
    cols = _COLS if gated else _SINGLE_COLS
    _activate[(triton.cdiv(width, cols), triton.cdiv(rows, 4 * _QUADS))](
        y, found, used, *room, rows // 4, width, kind, gated, torch.finfo(FORWARD).max, SLOTS, _QUADS, cols, num_warps=4
    )  # fmt: skip
    return room, found


def column_norms(weight: Tensor) -> Tensor:
    """Return the largest norm in each of at most SLOTS groups of a weight's columns."""
    rows, cols = weight.shape
    each = max(64, triton.next_power_of_2(triton.cdiv(cols, SLOTS)))
    found = torch.empty(triton.cdiv(cols, each), dtype=torch.float32, device=weight.device)
    _column_norms[(len(found),)](weight.contiguous(), found, rows, cols, 32, each, num_warps=4)
    return found


def gradient_scale(d8: Quantised, norms: Tensor, largest: Tensor, *, gated: bool) -> Tensor:
    """Return the scale of the gradient of the inner matmul's output.

    Args:
        d8: the gradient of the MLP's output.
        norms: `column_norms` of the down projection.
        largest: what `rounded_activation` measured.
    """
    scale = torch.empty((), dtype=torch.float32, device=norms.device)
    factor = _MARGIN * _STEEPEST * d8.values.shape[1] ** 0.5
    _bound[(1,)](d8.scale, norms, len(norms), largest, largest.shape[1], scale, factor, gated, SLOTS, num_warps=4)
    return scale


def rounded_gradient(
    d_out: Tensor, y: Tensor, kind: str, scale: Tensor, *, gated: bool, summed: torch.dtype | None
) -> tuple[Quantised, Tensor | None]:
    """Return the gradient of y, rounded with a scale, given that of the activation; and its sum over rows, of type `summed`, if that is
    given."""
    rows, width = d_out.shape
    chunks = triton.cdiv(rows, 4 * _QUADS)
    room = room_for(rows, y.shape[1], GRADIENT, y.device)._replace(scale=scale)
    partial = None if summed is None else torch.empty((chunks, y.shape[1]), dtype=torch.float32, device=y.device)
    _differentiate[(triton.cdiv(width, _COLS), chunks)](
        d_out, y, scale, room.values, room.transposed, partial, rows // 4, width, kind, gated, summed is not None, torch.finfo(GRADIENT).max,
        _QUADS, _COLS, num_warps=4,
    )  # fmt: skip
    return room, None if partial is None or summed is None else sum_rows(partial, summed)

"""Quantise to 8-bit floats: one pass finds the largest magnitude, unless the kernel that wrote the tensor has found it, and another
rounds and writes the tensor and its transpose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.model.ops.fp8 import Quantised
from argosy.model.ops.largest import SLOTS

_TILE = 8192
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# The size of a tile, in quads of rows and in columns.
_QUADS, _COLS = 16, 64


@triton.jit
def _largest(x, parts, count, each, B: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * each
    found = tl.zeros((B,), tl.float32)
    for start in tl.range(0, each, B, num_stages=3):
        at = first + start + tl.arange(0, B)
        inside = (start + tl.arange(0, B) < each) & (at < count)
        size = tl.abs(tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
        # A maximum would ignore a NaN.
        found = tl.maximum(found, tl.where(size == size, size, float("inf")))
    tl.store(parts + tl.program_id(0), tl.max(found, 0))


@triton.jit
def store_scaled(value, inverse, target, inside, LARGEST: tl.constexpr):
    """Store values times the inverse of their scale in 8 bits, and return them as they were before that rounding. A NaN stays one."""
    value = tl.clamp(value * inverse, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(target, value.to(target.dtype.element_ty), mask=inside)
    return value


@triton.jit
def _words(a, b, c, d, dtype: tl.constexpr):
    """Return 32-bit words of four values rounded to 8 bits; the first is first in memory."""
    if _INTERPRETED:
        word = a.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32)
        word |= b.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32) << 8
        word |= c.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32) << 16
        return word | (d.to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32) << 24)
    else:
        # For shifted bytes, Triton 3.7 emits code that crashes CUDA's assembler.
        kind: tl.constexpr = "e5m2x2" if dtype == tl.float8e5 else "e4m3x2"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite." + kind + ".f32 low, $2, $1; cvt.rn.satfinite." + kind
            + ".f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def store_transposed(a, b, c, d, transposed, quad, col, quads, cols, height):
    """Store a tile transposed in 8 bits, in rows of `height` words. A word has four of the tile's rows: of a, b, c and d.

    Triton 3.6 exchanges single bytes between threads slowly, and in some kernels wrongly.

    Args:
        quad: the numbers of the tile's words, of `quads` in all.
        height: a number of its own, and not a quotient of rows, so that Triton can see whether it is a multiple of 16.
    """
    inside = (quad < quads)[:, None] & (col < cols)[None, :]
    at = col.to(tl.int64)[None, :] * height + quad[:, None]
    words = _words(a, b, c, d, transposed.dtype.element_ty)
    tl.store(transposed.to(tl.pointer_type(tl.uint32)) + at, words, mask=inside)


@triton.jit
def scale_of(parts, used, LARGEST: tl.constexpr, PARTS: tl.constexpr):
    """Return the scale of a tensor, given the largest magnitudes of its parts."""
    part = tl.arange(0, PARTS)
    return tl.maximum(tl.max(tl.load(parts + part, mask=part < used, other=0.0), 0) / LARGEST, 1e-30)


@triton.jit
def _round(
    x, parts, used, values, transposed, scale, rows, quads, cols, height, LARGEST: tl.constexpr, PARTS: tl.constexpr,
    QUADS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    factor = scale_of(parts, used, LARGEST, PARTS)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, factor)
    inverse = tl.div_rn(1.0, factor)
    quad = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    col = tl.program_id(0) * C + tl.arange(0, C)
    at = quad.to(tl.int64)[:, None] * (4 * cols) + col[None, :]
    across = (col < cols)[None, :]
    in_a = (quad * 4 < rows)[:, None] & across
    in_b = (quad * 4 + 1 < rows)[:, None] & across
    in_c = (quad * 4 + 2 < rows)[:, None] & across
    in_d = (quad * 4 + 3 < rows)[:, None] & across
    # All loads are before the first store: the compiler does not exchange them.
    a = tl.load(x + at, mask=in_a, other=0.0).to(tl.float32)
    b = tl.load(x + at + cols, mask=in_b, other=0.0).to(tl.float32)
    c = tl.load(x + at + 2 * cols, mask=in_c, other=0.0).to(tl.float32)
    d = tl.load(x + at + 3 * cols, mask=in_d, other=0.0).to(tl.float32)
    a = store_scaled(a, inverse, values + at, in_a, LARGEST)
    b = store_scaled(b, inverse, values + at + cols, in_b, LARGEST)
    c = store_scaled(c, inverse, values + at + 2 * cols, in_c, LARGEST)
    d = store_scaled(d, inverse, values + at + 3 * cols, in_d, LARGEST)
    store_transposed(a, b, c, d, transposed, quad, col, quads, cols, height)


def room_for(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Quantised:
    """Return uninitialised tensors for a rounded tensor."""
    return Quantised(
        torch.empty((rows, cols), dtype=dtype, device=device),
        torch.empty((cols, rows), dtype=dtype, device=device),
        torch.empty((), dtype=torch.float32, device=device),
    )


def largest_of(*tensors: Tensor) -> Tensor:
    """Return the largest magnitudes of parts of some tensors, at most SLOTS. Their elements may be in any order in memory."""
    found = []
    for x in tensors:
        each = triton.cdiv(triton.cdiv(x.numel(), SLOTS // len(tensors)), _TILE) * _TILE
        found.append((x, each, triton.cdiv(x.numel(), each)))
    parts = torch.empty(sum(used for _, _, used in found), dtype=torch.float32, device=tensors[0].device)
    first = 0
    for x, each, used in found:
        _largest[(used,)](x, parts[first:], x.numel(), each, _TILE, num_warps=8)
        first += used
    return parts


def quantise(tensors: Sequence[Tensor], dtype: torch.dtype, parts: Tensor | None = None) -> Quantised:
    """Return tensors [rows, cols] rounded with one scale, one below the other, like `argosy.model.ops.fp8.quantise`.

    Only multiples of 4 rows are transposed. Matmuls that read the transposed values need multiples of 16.

    Args:
        parts: the largest magnitudes of parts of them, if the kernel that wrote them found these.
    """
    tensors = [x.contiguous() for x in tensors]
    parts = largest_of(*tensors) if parts is None else parts
    height, cols = sum(len(x) for x in tensors), tensors[0].shape[1]
    room = room_for(height, cols, dtype, tensors[0].device)
    first = 0
    for x in tensors:
        rows = len(x)
        _round[(triton.cdiv(cols, _COLS), triton.cdiv(rows, 4 * _QUADS))](
            x, parts, len(parts), room.values[first:], room.transposed[:, first:], room.scale, rows, rows // 4, cols, height // 4,
            torch.finfo(dtype).max, SLOTS, _QUADS, _COLS, num_warps=4,
        )  # fmt: skip
        first += rows
    return room

"""Quantise to 8-bit floats: one pass finds the largest magnitude, unless the kernel that wrote the tensor has found it, and another
rounds and writes the tensor and its transpose."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.model.ops.largest import SLOTS

_SLOTS = tl.constexpr(SLOTS)
# The most programs of the first pass. Each leaves one maximum for the second.
_PARTS = SLOTS
_TILE = 8192
_ROWS, _COLS = 64, 64


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
def _round(
    x, parts, used, values, transposed, scale, rows, cols, LARGEST: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    part = tl.arange(0, PARTS)
    factor = tl.maximum(tl.max(tl.load(parts + part, mask=part < used, other=0.0), 0) / LARGEST, 1e-30)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, factor)
    row = tl.program_id(1) * R + tl.arange(0, R)
    col = tl.program_id(0) * C + tl.arange(0, C)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * cols + col[None, :], mask=inside, other=0.0).to(tl.float32)
    value = tl.minimum(tl.maximum(value / factor, -LARGEST), LARGEST).to(values.dtype.element_ty)
    tl.store(values + row.to(tl.int64)[:, None] * cols + col[None, :], value, mask=inside)
    other = (col < cols)[:, None] & (row < rows)[None, :]
    tl.store(transposed + col.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(value), mask=other)


@triton.jit
def raise_largest(found, slot, value):
    """Raise one of the maxima that `argosy.model.ops.largest` keeps to the largest magnitude among the values."""
    size = tl.abs(value.to(tl.float32))
    size = tl.max(tl.where(size == size, size, float("inf")))
    tl.atomic_max(found + slot % _SLOTS, size.to(tl.int32, bitcast=True), sem="relaxed")


def quantise(x: Tensor, dtype: torch.dtype, parts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values, transposed values and scale of x [rows, cols], like `argosy.model.ops.fp8.quantise`.

    Args:
        parts: the largest magnitudes of parts of x, if the kernel that wrote x found them.
    """
    x = x.contiguous()
    rows, cols = x.shape
    used = SLOTS
    if parts is None:
        parts = torch.empty(_PARTS, dtype=torch.float32, device=x.device)
        each = triton.cdiv(triton.cdiv(x.numel(), _PARTS), _TILE) * _TILE
        used = triton.cdiv(x.numel(), each)
        _largest[(used,)](x, parts, x.numel(), each, _TILE, num_warps=8)
    values = torch.empty((rows, cols), dtype=dtype, device=x.device)
    transposed = torch.empty((cols, rows), dtype=dtype, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    _round[(triton.cdiv(cols, _COLS), triton.cdiv(rows, _ROWS))](
        x, parts, used, values, transposed, scale, rows, cols, torch.finfo(dtype).max, _PARTS, _ROWS, _COLS, num_warps=4
    )
    return values, transposed, scale

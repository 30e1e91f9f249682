"""Sums over rows, as the gradients of biases and norms are. The order of the additions is fixed, so that results are deterministic.

Programs of a large matrix sum some rows each (`column_sums`, and kernels that compute the matrix). `sum_rows` then adds up what they have
found. torch's own sum takes three times as long for so few numbers, and rounds in a kernel of its own.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.model.ops.token_sums import noted_sums

# A tile of `sum_rows`, and one of `column_sums`, whose programs have several below each other.
_ROWS, _COLS = 64, 32
_HEIGHT, _WIDTH, _TILES_DOWN = 16, 256, 16


@triton.jit
def _sum_rows(parts, sums, rows, width, R: tl.constexpr, C: tl.constexpr):
    col = tl.program_id(0) * C + tl.arange(0, C)
    first = parts + tl.program_id(1).to(tl.int64) * rows * width
    total = tl.zeros((R, C), tl.float32)
    for start in tl.range(0, rows, R, num_stages=3):
        row = start + tl.arange(0, R)
        inside = (row < rows)[:, None] & (col < width)[None, :]
        total += tl.load(first + row[:, None] * width + col[None, :], mask=inside, other=0.0)
    found = tl.sum(total, 0).to(sums.dtype.element_ty)
    tl.store(sums + tl.program_id(1) * width + col, found, mask=col < width)


def sum_rows(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums [.., width] over the rows of 32-bit parts [.., rows, width], rounded to `dtype`."""
    *kinds, rows, width = parts.shape
    sums = torch.empty((*kinds, width), dtype=dtype, device=parts.device)
    # Without rows, the sums are zeros.
    _sum_rows[(triton.cdiv(width, _COLS), prod(kinds))](parts, sums, rows, width, _ROWS, _COLS, num_warps=4)
    return sums


@triton.jit
def _column_sums(x, sums, rows, width, R: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr):
    col = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((R, C), tl.float32)
    for tile in tl.range(0, TILES, num_stages=3):
        row = (tl.program_id(1).to(tl.int64) * TILES + tile) * R + tl.arange(0, R)
        inside = (row < rows)[:, None] & (col < width)[None, :]
        total += tl.load(x + row[:, None] * width + col[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(1) * width + col, tl.sum(total, 0), mask=col < width)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over the rows of x [.., width], which is contiguous, rounded to `dtype`."""
    width = x.shape[-1]
    rows = x.numel() // width
    chunks = triton.cdiv(rows, _HEIGHT * _TILES_DOWN)
    parts = torch.empty((chunks, width), dtype=torch.float32, device=x.device)
    _column_sums[(triton.cdiv(width, _WIDTH), chunks)](x, parts, rows, width, _HEIGHT, _WIDTH, _TILES_DOWN, num_warps=4)
    return sum_rows(parts, dtype)


def bias_gradient(d_y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a bias that was added to every row of y, as noted with the gradient of y, or summed here."""
    sums = noted_sums(d_y)
    return column_sums(d_y, dtype) if sums is None else sums.to(dtype)

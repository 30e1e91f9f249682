"""The gradient of logits, rounded to 8 bits as it is computed, plain and transposed (`argosy.model.ops.fp8_cross_entropy`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.data.samples.masks import IGNORED
from argosy.model.ops.fp8 import GRADIENT
from argosy.model.ops.fp8_cross_entropy import SCALE
from argosy.model.ops.kernels.fp8_kernel import store_scaled, store_transposed
from argosy.model.ops.kernels.row_sums_kernel import sum_rows

# The size of a tile, in quads of rows and in columns.
_QUADS, _COLS = 16, 64


@triton.jit
def _gradient(logit, labels, lses, row, inside, col, vocab, begin, z_loss, ignored):
    """Return the gradient of a tile of logits, and zeros for padding, ignored labels and rows that are not `inside`."""
    label = tl.load(labels + row, mask=inside, other=ignored)
    lse = tl.load(lses + row, mask=inside, other=0.0)
    gradient = tl.exp(logit.to(tl.float32) - lse[:, None]) * (1.0 + 2.0 * z_loss * lse)[:, None]
    gradient = tl.where(col[None, :] == (label - begin)[:, None], gradient - 1.0, gradient)
    return tl.where((label != ignored)[:, None] & (col < vocab)[None, :], gradient, 0.0)


@triton.jit
def _rounded_gradient(
    logits, labels, lses, values, transposed, d_bias, quads, height, width, vocab, begin, z_loss, inverse, ignored,
    SUMMED: tl.constexpr, LARGEST: tl.constexpr, QUADS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    quad = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    col = tl.program_id(0) * C + tl.arange(0, C)
    down = quad < quads
    inside = down[:, None] & (col < width)[None, :]
    at = quad.to(tl.int64)[:, None] * (4 * width) + col[None, :]
    # All loads are before the first store: the compiler does not exchange them.
    a = tl.load(logits + at, mask=inside, other=0.0)
    b = tl.load(logits + at + width, mask=inside, other=0.0)
    c = tl.load(logits + at + 2 * width, mask=inside, other=0.0)
    d = tl.load(logits + at + 3 * width, mask=inside, other=0.0)
    row = quad * 4
    a = _gradient(a, labels, lses, row, down, col, vocab, begin, z_loss, ignored)
    b = _gradient(b, labels, lses, row + 1, down, col, vocab, begin, z_loss, ignored)
    c = _gradient(c, labels, lses, row + 2, down, col, vocab, begin, z_loss, ignored)
    d = _gradient(d, labels, lses, row + 3, down, col, vocab, begin, z_loss, ignored)
    if SUMMED:
        total = tl.sum((a + b) + (c + d), 0)
        tl.store(d_bias + tl.program_id(1).to(tl.int64) * width + col, total, mask=col < width)
    a = store_scaled(a, inverse, values + at, inside, LARGEST)
    b = store_scaled(b, inverse, values + at + width, inside, LARGEST)
    c = store_scaled(c, inverse, values + at + 2 * width, inside, LARGEST)
    d = store_scaled(d, inverse, values + at + 3 * width, inside, LARGEST)
    store_transposed(a, b, c, d, transposed, quad, col, quads, width, height)


def rounded_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, transposed: Tensor, z_loss: float, vocab: int, first: int, *, summed: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return what `argosy.model.ops.fp8_cross_entropy.rounded_gradient` returns, computed by one kernel, for a multiple of 4 rows."""
    rows, width = logits.shape
    tiles = triton.cdiv(rows, 4 * _QUADS)
    values = torch.empty((rows, width), dtype=GRADIENT, device=logits.device)
    parts = torch.empty((tiles, width), dtype=torch.float32, device=logits.device) if summed else None
    _rounded_gradient[(triton.cdiv(width, _COLS), tiles)](
        logits, labels, lse, values, transposed, parts, rows // 4, transposed.stride(0) // 4, width, vocab, first, z_loss, 1 / SCALE,
        IGNORED, summed, torch.finfo(GRADIENT).max, _QUADS, _COLS, num_warps=4,
    )  # fmt: skip
    return values, None if parts is None else sum_rows(parts, torch.float32)

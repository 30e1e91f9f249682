"""The gradient of an embedding table.

The uses of a row are sorted together and their gradients summed in 32 bits. A row with very many uses is summed in parts, one
program per part, and another program sums the parts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from argosy.model.ops.matmul import added

# Uses that one program sums, and the columns it sums them for.
_PART, _COLS = 64, 1024


@triton.jit
def _slot(use, first, PART: tl.constexpr):
    """Return the slot of the part that begins with a use.

    Among PART consecutive uses at most two begin a part that needs a slot: one that continues a row begun earlier, and the first
    of another row.
    """
    return 2 * (use // PART) + (use == first)


@triton.jit
def _write(target, value, inside, ADDS: tl.constexpr):
    """Write the gradient of a part of a row, which no other program writes, or add it."""
    if ADDS:
        value += tl.load(target, mask=inside, other=0.0)
    tl.store(target, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _add_uses(
    order, firsts, ends, rows, d_out, partial, d_weight, width, ADDS: tl.constexpr, PART: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    use = tl.program_id(0).to(tl.int64)
    first, end = tl.load(firsts + use), tl.load(ends + use)
    # Otherwise another program sums this use.
    if (use - first) % PART == 0:
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        inside = col < width
        total = tl.zeros((COLS,), tl.float32)
        for other in range(use, tl.minimum(use + PART, end)):
            token = tl.load(order + other).to(tl.int64)
            total += tl.load(d_out + token * width + col, mask=inside, other=0.0).to(tl.float32)
        if end - first > PART:
            tl.store(partial + _slot(use, first, PART) * width + col, total, mask=inside)
        else:
            _write(d_weight + tl.load(rows + use).to(tl.int64) * width + col, total, inside, ADDS)


@triton.jit
def _add_parts(
    firsts, ends, rows, partial, d_weight, width, ADDS: tl.constexpr, PART: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    use = tl.program_id(0).to(tl.int64)
    first, end = tl.load(firsts + use), tl.load(ends + use)
    if (use == first) & (end - first > PART):
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        inside = col < width
        total = tl.zeros((COLS,), tl.float32)
        for part in range(first, end, PART):
            total += tl.load(partial + _slot(part, first, PART) * width + col, mask=inside, other=0.0)
        _write(d_weight + tl.load(rows + use).to(tl.int64) * width + col, total, inside, ADDS)


class Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        # The weight itself, to whose gradient this one may be added.
        ctx.weight = weight
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (tokens,) = ctx.saved_tensors
        return None, added(ctx.weight, partial(_table_gradient, ctx.weight, tokens, gradients[0].contiguous()))


def _table_gradient(
    weight: Tensor, tokens: Tensor, d_out: Tensor, total: Tensor | None = None, *, wide: bool = False
) -> Tensor:
    """Return the gradient of a table as a `GradientOf` does. Rows that are not used are not read."""
    adds = total is not None
    if total is None:
        dtype = torch.float32 if wide else weight.dtype
        total = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    width = weight.shape[1]
    rows, order = tokens.flatten().int().sort(stable=True)
    if len(rows):
        firsts, ends = torch.searchsorted(rows, rows), torch.searchsorted(rows, rows, right=True)
        slots = 2 * triton.cdiv(len(rows), _PART)
        parts = torch.empty((slots, width), dtype=torch.float32, device=d_out.device)
        grid = (len(rows), triton.cdiv(width, _COLS))
        _add_uses[grid](order, firsts, ends, rows, d_out, parts, total, width, adds, _PART, _COLS, num_warps=4)
        _add_parts[grid](firsts, ends, rows, parts, total, width, adds, _PART, _COLS, num_warps=4)
    return total

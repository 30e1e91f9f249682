"""Sums of matrices in 32 bits and one pass: the parts of a split-K GEMM, and the gradient that is summed over micro-batches. Torch's own
reduction over so few parts takes four times as long, and its sum of a 16-bit and a 32-bit matrix reads one number at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum(parts, out, count, PARTS: tl.constexpr, ADDS: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < count
    total = tl.zeros((B,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * tl.cast(count, tl.int64) + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        total += tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def sum_parts(parts: Tensor, total: Tensor | None = None, *, wide: bool = False) -> Tensor:
    """Return parts[0] + parts[1] + …, which are contiguous, as a `GradientOf` does."""
    out = total if total is not None else torch.empty_like(parts[0], dtype=torch.float32 if wide else None)
    adds, block = total is not None, 2048
    _sum[(triton.cdiv(out.numel(), block),)](parts, out, out.numel(), len(parts), adds, block, num_warps=4)
    return out

"""Gather rows by index and sum them, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather_sum(source, index, out, width, K: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * C + tl.arange(0, C)
    inside = col < width
    total = tl.zeros((C,), tl.float32)
    for place in tl.static_range(K):
        at = tl.load(index + row * K + place) * width
        total += tl.load(source + at + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + col, total.to(out.dtype.element_ty), mask=inside)


def gather_sum(source: Tensor, index: Tensor) -> Tensor:
    """Return the sum over j of source[index[i, j]] for each i."""
    source, index = source.contiguous(), index.contiguous()
    width = source.shape[1]
    out = torch.empty((index.shape[0], width), dtype=source.dtype, device=source.device)
    columns = min(4096, triton.next_power_of_2(width))
    warps = max(1, min(8, columns // 256))
    _gather_sum[(index.shape[0], triton.cdiv(width, columns))](
        source, index, out, width, index.shape[1], columns, num_warps=warps
    )
    return out

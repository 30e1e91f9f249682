"""The sum of squares of many tensors, read once by one launch for each precision. Torch's own takes about twice as long."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.compat import square_sum as torch_square_sum
from argosy.model.ops.kernels.tensor_table import ADDRESSES, TYPES, Row, address, is_aligned, laid_out, piece

# Elements that a program sums.
_BLOCK = 16384
# Squares that are added up in fp32. A longer sum of equal numbers would be off by more than their norm's rounding.
_TERMS = tl.constexpr(4)
_COLUMNS = tl.constexpr(ADDRESSES.value + 1)


@triton.jit
def _square_sums(table, row_of, sums, element: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr):
    row, at, inside = piece(table, row_of, _COLUMNS, ALIGNED, B)
    x = tl.load(address(row, ADDRESSES, element, ALIGNED) + at, mask=inside, other=0.0).to(tl.float32)
    few = tl.sum(tl.reshape(x * x, (_TERMS, B // _TERMS)), 0)
    tl.store(sums + tl.program_id(0), tl.sum(few.to(tl.float64), 0))


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements of tensors on one device, in fp64, without a host sync.

    Four squares each are added up in fp32, and all else in fp64, in an order that depends on the shapes and the alignment of the tensors
    alone.
    """
    alike: dict[tuple[torch.dtype, bool], list[Row]] = {}
    for x in tensors:
        if x.numel():
            row = (x.contiguous(),)
            alike.setdefault((x.dtype, is_aligned(row)), []).append(row)
    found = [torch.zeros((), dtype=torch.float64, device=tensors[0].device)]
    for (dtype, aligned), rows in alike.items():
        if dtype not in TYPES:
            found.append(torch_square_sum([x for (x,) in rows]))
            continue
        table, row_of = laid_out(rows, _BLOCK)
        sums = torch.empty(len(row_of), dtype=torch.float64, device=row_of.device)
        _square_sums[(len(row_of),)](table, row_of, sums, TYPES[dtype], aligned, _BLOCK, num_warps=8)
        found.append(sums.sum())
    return torch.stack(found).sum()

"""One Triton launch over many tensors: a table of their addresses.

A program works on a block of one row of the table. The table is made anew for each launch, because gradients move. One launch per tensor
would take the host longer than a small model's step takes the GPU, and would leave the GPU half empty on every norm and bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Bytes of a wide load. The number of elements is a multiple of it too, so that the last load is wide.
_ALIGNED = tl.constexpr(16)
# Columns of the table: the number of elements, the first program for the row, and addresses.
COUNT, FIRST, ADDRESSES = (tl.constexpr(n) for n in range(3))
# The tensors of one row in the order of their addresses, contiguous. The first has as many elements as the row.
Row = tuple[Tensor, ...]
# The element types that kernels read by address.
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def piece(table, row_of, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr):
    """Return this program's row of the table, the indices of the elements it works on, and a mask of those that exist."""
    row = table + tl.load(row_of + tl.program_id(0)) * COLUMNS
    count = tl.load(row + COUNT)
    if ALIGNED:
        count = tl.multiple_of(count, _ALIGNED)
    at = (tl.program_id(0) - tl.load(row + FIRST)) * B + tl.arange(0, B)
    return row, at, at < count


@triton.jit
def address(row, column: tl.constexpr, element: tl.constexpr, ALIGNED: tl.constexpr):
    where = tl.load(row + column).to(tl.pointer_type(element))
    return tl.multiple_of(where, _ALIGNED) if ALIGNED else where


def is_aligned(row: Row) -> bool:
    """Return whether a row can be read by wide loads."""
    wide = _ALIGNED.value
    return row[0].numel() % wide == 0 and all(part.data_ptr() % wide == 0 for part in row)


def laid_out(rows: Sequence[Row], block: int) -> tuple[Tensor, Tensor]:
    """Return the table of some rows, and the row of each program, if each program works on `block` elements."""
    device = rows[0][0].device
    row_of, firsts = _programs(tuple(row[0].numel() for row in rows), block, device)
    return _table(rows, firsts, device), row_of


def _table(rows: Iterable[Row], firsts: Sequence[int], device: torch.device) -> Tensor:
    """Return the table of the columns named above. The host does not wait for its transfer."""
    facts = [
        [row[0].numel(), first, *(part.data_ptr() for part in row)] for row, first in zip(rows, firsts, strict=True)
    ]
    return torch.tensor(facts, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@lru_cache(maxsize=32)
def _programs(counts: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Return the row that each program works on, and the first program of each row."""
    programs = torch.tensor([triton.cdiv(count, block) for count in counts])
    row_of = torch.repeat_interleave(torch.arange(len(counts)), programs)
    return row_of.to(device, torch.int32), (programs.cumsum(0) - programs).tolist()

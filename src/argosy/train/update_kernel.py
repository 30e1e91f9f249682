"""One Triton launch over many parameters: the shared code of the optimiser kernels.

A program updates a piece of one parameter. It reads the addresses of the tensors from a table, which is made anew for each step
because gradients move. One launch per parameter would take the host longer than a small model's step takes the GPU, and would leave
the GPU half empty on every norm and bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.train.slots import Slot

# Elements that a program updates.
_BLOCK = 4096
# Bytes of a wide load. The number of elements is a multiple of it too, so that the last load is wide.
_ALIGNED = tl.constexpr(16)
# Columns of the table: the number of elements, the first program for the row, and addresses. The state's tensors are the last.
COUNT, FIRST, PARAMETER, MASTER, GRADIENT, STATE = (tl.constexpr(n) for n in range(6))
# The tensors of one parameter in the order of the addresses, all of one length and contiguous.
Row = tuple[Tensor, ...]


@triton.jit
def piece(table, row_of, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr):
    """Return this program's row of the table, the indices of the elements it updates, and a mask of those that exist."""
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


def launch(kernel: Any, slots: Sequence[Slot], gradients: Sequence[Tensor], *arguments: Tensor | float) -> None:
    """Run `kernel(table, row_of, *arguments, parameter_type, gradient_type, ALIGNED, B)` over all slots, once for each
    combination of precisions and alignment among them."""
    alike: dict[tuple[torch.dtype, torch.dtype, bool], list[Row]] = {}
    for slot, gradient in zip(slots, gradients, strict=True):
        row = (slot.part, slot.master, gradient, *slot.state.values())
        alike.setdefault((slot.part.dtype, gradient.dtype, _is_aligned(row)), []).append(row)
    device = slots[0].master.device
    for (parameter, gradient_type, aligned), rows in alike.items():
        row_of, firsts = _programs(tuple(row[0].numel() for row in rows), device)
        kernel[(len(row_of),)](
            _table(rows, firsts, device), row_of, *arguments, _TYPES[parameter], _TYPES[gradient_type], aligned, _BLOCK,
            num_warps=8,
        )  # fmt: skip


def _is_aligned(row: Row) -> bool:
    wide = _ALIGNED.value
    return row[0].numel() % wide == 0 and all(part.data_ptr() % wide == 0 for part in row)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _table(rows: Iterable[Row], firsts: Sequence[int], device: torch.device) -> Tensor:
    """Return the table of the columns named above, one row per parameter. The host does not wait for its transfer."""
    facts = [
        [row[0].numel(), first, *(part.data_ptr() for part in row)] for row, first in zip(rows, firsts, strict=True)
    ]
    return torch.tensor(facts, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _programs(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, list[int]]:
    """Return the row that each program works on, and the first program of each row."""
    programs = torch.tensor([triton.cdiv(count, _BLOCK) for count in counts])
    row_of = torch.repeat_interleave(torch.arange(len(counts)), programs)
    return row_of.to(device, torch.int32), (programs.cumsum(0) - programs).tolist()

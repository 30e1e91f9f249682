"""One Triton launch over many parameters: the shared code of the optimiser kernels. A program updates a piece of one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from argosy.model.ops.kernels.tensor_table import ADDRESSES, TYPES, Row, address, is_aligned, laid_out, piece
from argosy.train.slots import Slot

__all__ = ["GRADIENT", "MASTER", "PARAMETER", "STATE", "address", "launch", "piece"]

# Elements that a program updates.
_BLOCK = 4096
# Columns of the table: addresses. The state's tensors are the last, but for where the largest magnitudes go.
PARAMETER, MASTER, GRADIENT, STATE = (tl.constexpr(ADDRESSES.value + n) for n in range(4))


def launch(
    kernel: Any,
    slots: Sequence[Slot],
    gradients: Sequence[Tensor],
    *arguments: Tensor | float,
    largest: Sequence[Tensor | None] | None = None,
) -> None:
    """Run `kernel(table, row_of, *arguments, parameter_type, gradient_type, ALIGNED, B)` over all slots, once for each
    combination of precisions and alignment among them.

    Args:
        largest: for each slot, where the kernel writes the largest magnitudes of its parameter, if it does. Its address is the last
            column then, and the kernel's constant MEASURED is true.
    """
    alike: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[Row]] = {}
    for slot, gradient, found in zip(slots, gradients, largest or [None] * len(slots), strict=True):
        row = (slot.part, slot.master, gradient, *slot.state.values(), *(() if found is None else (found,)))
        alike.setdefault((slot.part.dtype, gradient.dtype, is_aligned(row), found is not None), []).append(row)
    for (parameter, gradient_type, aligned, measured), rows in alike.items():
        table, row_of = laid_out(rows, _BLOCK)
        kernel[(len(row_of),)](
            table, row_of, *arguments, TYPES[parameter], TYPES[gradient_type], aligned, _BLOCK,
            num_warps=8, **({"MEASURED": True} if measured else {}),
        )  # fmt: skip

"""AdamW for many parameters in one pass over memory and one launch: gradients in any precision, moments and masters in 32
bits, and the parameters themselves written in their own precision on the way.

A program updates a piece of one parameter. Where the parameters lie is read from a table of addresses, made anew for each
step, since gradients move. A launch for each parameter instead takes the host longer than a small model's step takes
the GPU, and leaves the GPU half empty on every norm and bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # elements a program updates
_ALIGNED = tl.constexpr(
    16
)  # bytes of a wide load, and a parameter's elements a multiple, for its last one to be wide too
# Columns of the table: the addresses of a `Row` in its order, how many elements it has, and the first program for it.
_PARAMETER, _MASTER, _GRADIENT, _EXP_AVG, _EXP_AVG_SQ, _COUNT, _FIRST, _COLUMNS = (tl.constexpr(n) for n in range(8))


class Row(NamedTuple):
    """One parameter, all of one length and contiguous."""

    parameter: Tensor
    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def aligned(self) -> bool:
        return self.master.numel() % _ALIGNED.value == 0 and all(part.data_ptr() % _ALIGNED.value == 0 for part in self)


@triton.jit
def _address(table, column: tl.constexpr, element: tl.constexpr, ALIGNED: tl.constexpr):
    where = tl.load(table + column).to(tl.pointer_type(element))
    return tl.multiple_of(where, _ALIGNED) if ALIGNED else where


@triton.jit
def _update(
    table, row_of, scale, corrections, skip, lr, beta1, beta2, eps, decay,
    parameter_type: tl.constexpr, gradient_type: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) == 0.0:
        table += tl.load(row_of + tl.program_id(0)) * _COLUMNS
        count = tl.load(table + _COUNT)
        if ALIGNED:
            count = tl.multiple_of(count, _ALIGNED)
        at = (tl.program_id(0) - tl.load(table + _FIRST)) * B + tl.arange(0, B)
        inside = at < count
        gradient = _address(table, _GRADIENT, gradient_type, ALIGNED) + at
        exp_avg = _address(table, _EXP_AVG, tl.float32, ALIGNED) + at
        exp_avg_sq = _address(table, _EXP_AVG_SQ, tl.float32, ALIGNED) + at
        master = _address(table, _MASTER, tl.float32, ALIGNED) + at
        g = tl.load(gradient, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
        m = tl.load(exp_avg, mask=inside, other=0.0)
        v = tl.load(exp_avg_sq, mask=inside, other=0.0)
        w = tl.load(master, mask=inside, other=0.0)
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        w = w * decay - lr * (m / tl.load(corrections)) / (tl.sqrt(v / tl.load(corrections + 1)) + eps)
        tl.store(exp_avg, m, mask=inside)
        tl.store(exp_avg_sq, v, mask=inside)
        tl.store(master, w, mask=inside)
        if parameter_type != tl.float32:
            tl.store(_address(table, _PARAMETER, parameter_type, ALIGNED) + at, w.to(parameter_type), mask=inside)


def adamw_(
    rows: Iterable[Row],
    *,
    scale: Tensor,
    corrections: Tensor,
    skip: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One update, in place. All on the device and 32-bit: `scale` multiplies the gradients, `corrections` are the two
    bias corrections 1 - beta^step, and where `skip` is not 0 nothing changes."""
    alike: dict[tuple[torch.dtype, torch.dtype, bool], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.parameter.dtype, row.gradient.dtype, row.aligned), []).append(row)
    for (parameter, gradient, aligned), some in alike.items():
        row_of, firsts = _programs(tuple(row.master.numel() for row in some), scale.device)
        _update[(len(row_of),)](
            _table(some, firsts, scale.device), row_of, scale, corrections, skip, lr, betas[0], betas[1], eps,
            1.0 - lr * weight_decay, _TYPES[parameter], _TYPES[gradient], aligned, _BLOCK, num_warps=8,
        )  # fmt: skip


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _table(rows: Sequence[Row], firsts: Sequence[int], device: torch.device) -> Tensor:
    """The columns named above, by row. The host does not wait for its transfer."""
    facts = [
        [*(part.data_ptr() for part in row), row.master.numel(), first] for row, first in zip(rows, firsts, strict=True)
    ]
    return torch.tensor(facts, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _programs(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, list[int]]:
    """Which row each program works on, and of each row the first program."""
    programs = torch.tensor([triton.cdiv(count, _BLOCK) for count in counts])
    row_of = torch.repeat_interleave(torch.arange(len(counts)), programs)
    return row_of.to(device, torch.int32), (programs.cumsum(0) - programs).tolist()

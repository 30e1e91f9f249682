"""The AdamW kernel, one pass over memory. Gradients may have any precision; moments and master weights are 32-bit. The same pass
writes the parameters in their own precision. If `skip` is not 0, nothing changes.

If `MEASURED`, it also finds the largest magnitudes of the parameters as they are afterwards, in a skipped step too: the host does not know
that it was skipped. A program takes the maximum with what another found, which does not depend on their order."""

from __future__ import annotations

import triton
import triton.language as tl

from argosy.model.ops.largest import WEIGHT_PARTS
from argosy.train.update_kernel import GRADIENT, MASTER, PARAMETER, STATE, address, piece

_EXP_AVG, _EXP_AVG_SQ, _LARGEST = (tl.constexpr(STATE.value + n) for n in range(3))
_PARTS = tl.constexpr(WEIGHT_PARTS)


@triton.jit
def adamw_kernel(
    table, row_of, scale, corrections, skip, lr, beta1, beta2, eps, decay,
    parameter_type: tl.constexpr, gradient_type: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
    MEASURED: tl.constexpr = False,
):  # fmt: skip
    columns: tl.constexpr = _LARGEST + 1 if MEASURED else _LARGEST
    if tl.load(skip) == 0.0:
        row, at, inside = piece(table, row_of, columns, ALIGNED, B)
        gradient = address(row, GRADIENT, gradient_type, ALIGNED) + at
        exp_avg = address(row, _EXP_AVG, tl.float32, ALIGNED) + at
        exp_avg_sq = address(row, _EXP_AVG_SQ, tl.float32, ALIGNED) + at
        master = address(row, MASTER, tl.float32, ALIGNED) + at
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
            tl.store(address(row, PARAMETER, parameter_type, ALIGNED) + at, w.to(parameter_type), mask=inside)
        if MEASURED:
            _measure(address(row, _LARGEST, tl.int32, ALIGNED), w.to(parameter_type), inside)
    elif MEASURED:
        row, at, inside = piece(table, row_of, columns, ALIGNED, B)
        parameter = address(row, PARAMETER, parameter_type, ALIGNED) + at
        kept = tl.load(parameter, mask=inside, other=0.0)
        _measure(address(row, _LARGEST, tl.int32, ALIGNED), kept, inside)


@triton.jit
def _measure(largest, w, inside):
    """Raise one of the largest magnitudes, which begin at zero, to those of w. As integers, numbers that are not negative have the
    same order."""
    size = tl.abs(w.to(tl.float32))
    # A maximum would ignore a NaN.
    size = tl.where(inside, tl.where(size == size, size, float("inf")), 0.0)
    found = tl.max(size, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(largest + tl.program_id(0) % _PARTS, found, sem="relaxed")

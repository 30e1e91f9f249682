"""The AdamW kernel, one pass over memory. Gradients may have any precision; moments and master weights are 32-bit. The same pass
writes the parameters in their own precision. If `skip` is not 0, nothing changes."""

from __future__ import annotations

import triton
import triton.language as tl

from argosy.train.update_kernel import GRADIENT, MASTER, PARAMETER, STATE, address, piece

_EXP_AVG, _EXP_AVG_SQ, _COLUMNS = (tl.constexpr(STATE.value + n) for n in range(3))


@triton.jit
def adamw_kernel(
    table, row_of, scale, corrections, skip, lr, beta1, beta2, eps, decay,
    parameter_type: tl.constexpr, gradient_type: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) == 0.0:
        row, at, inside = piece(table, row_of, _COLUMNS, ALIGNED, B)
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

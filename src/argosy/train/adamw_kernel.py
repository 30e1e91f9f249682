"""AdamW for one parameter in one pass over memory: gradient in any precision, moments and master in 32 bits, and the
parameter itself written in its own precision on the way."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _update(
    parameter, master, gradient, exp_avg, exp_avg_sq, scale, corrections, skip, count,
    lr, beta1, beta2, eps, decay, SEPARATE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) == 0.0:
        at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        inside = at < count
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
        m = tl.load(exp_avg + at, mask=inside, other=0.0)
        v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
        w = tl.load(master + at, mask=inside, other=0.0)
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        w = w * decay - lr * (m / tl.load(corrections)) / (tl.sqrt(v / tl.load(corrections + 1)) + eps)
        tl.store(exp_avg + at, m, mask=inside)
        tl.store(exp_avg_sq + at, v, mask=inside)
        tl.store(master + at, w, mask=inside)
        if SEPARATE:
            tl.store(parameter + at, w.to(parameter.dtype.element_ty), mask=inside)


def adamw_(
    parameter: Tensor,
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    scale: Tensor,
    corrections: Tensor,
    skip: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One update, in place. All on the device and 32-bit: `scale` multiplies the gradient, `corrections` are the two
    bias corrections 1 - beta^step, and where `skip` is not 0 nothing changes."""
    _update[(triton.cdiv(parameter.numel(), _BLOCK),)](
        parameter, master, gradient, exp_avg, exp_avg_sq, scale, corrections, skip, parameter.numel(),
        lr, betas[0], betas[1], eps, 1.0 - lr * weight_decay, parameter.dtype != master.dtype, _BLOCK, num_warps=8,
    )  # fmt: skip

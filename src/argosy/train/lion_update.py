"""The Lion update: c = b1 m + (1 - b1) g,  w <- w - lr (sign(c) + decay w),  m <- b2 m + (1 - b2) g.

On a GPU a Triton kernel computes it in one pass over memory; elsewhere plain torch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from argosy.config.optimizers.lion import LionSpec
from argosy.model.ops.choice import installed, use_kernel
from argosy.train.slots import Apply, Slot, Update, write_parameters

if installed("triton"):
    import triton
    import triton.language as tl

    from argosy.train.update_kernel import GRADIENT, MASTER, PARAMETER, STATE, address, launch, piece

    _COLUMNS = tl.constexpr(STATE.value + 1)

    @triton.jit  # type: ignore[untyped-decorator]
    def lion_kernel(  # type: ignore[no-untyped-def]
        table, row_of, scale, skip, lr, beta1, beta2, decay,
        parameter_type: tl.constexpr, gradient_type: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
    ):  # fmt: skip
        if tl.load(skip) == 0.0:
            row, at, inside = piece(table, row_of, _COLUMNS, ALIGNED, B)
            momentum = address(row, STATE, tl.float32, ALIGNED) + at
            master = address(row, MASTER, tl.float32, ALIGNED) + at
            gradient = address(row, GRADIENT, gradient_type, ALIGNED) + at
            g = tl.load(gradient, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
            m = tl.load(momentum, mask=inside, other=0.0)
            w = tl.load(master, mask=inside, other=0.0)
            c = m + (1.0 - beta1) * (g - m)
            direction = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, c))
            w = w * decay - lr * direction
            tl.store(momentum, m + (1.0 - beta2) * (g - m), mask=inside)
            tl.store(master, w, mask=inside)
            if parameter_type != tl.float32:
                tl.store(address(row, PARAMETER, parameter_type, ALIGNED) + at, w.to(parameter_type), mask=inside)


def make_update(keys: LionSpec, model: nn.Module) -> Apply:
    def apply(slots: Sequence[Slot], gradients: Sequence[Tensor], update: Update, weight_decay: float) -> None:
        run = _one_pass if use_kernel(slots[0].master) else _plain
        run(slots, gradients, update, keys, weight_decay)

    return apply


def _plain(
    slots: Sequence[Slot], gradients: Sequence[Tensor], update: Update, keys: LionSpec, weight_decay: float
) -> None:
    beta1, beta2 = keys.betas
    go = 1 - update.skip
    for slot, gradient in zip(slots, gradients, strict=True):
        momentum = slot.state["exp_avg"]
        # In a skipped step the gradient may be infinite. With the momentum in its place, the momentum does not change.
        g = torch.where(go > 0, gradient.float() * update.scale, momentum)
        c = momentum.lerp(g, 1 - beta1)
        # The sign of NaN is 0: the weights would stop changing, and the loss would not show it.
        direction = torch.where(c.isnan(), c, c.sign())
        slot.master.mul_(1 - update.lr * weight_decay * go).sub_(direction * (update.lr * go))
        momentum.lerp_(g, 1 - beta2)
    write_parameters(slots)


def _one_pass(
    slots: Sequence[Slot], gradients: Sequence[Tensor], update: Update, keys: LionSpec, weight_decay: float
) -> None:
    decay = 1.0 - update.lr * weight_decay
    launch(lion_kernel, slots, gradients, update.scale, update.skip, update.lr, *keys.betas, decay)

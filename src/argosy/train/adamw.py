"""AdamW over 32-bit masters: a Triton kernel that does all in one pass where there is a GPU, torch's fused update elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from argosy.compat import copy_, fused_adamw_
from argosy.config.schema import OptimSpec
from argosy.config.state import STATE
from argosy.model.ops.choice import use_kernel
from argosy.train.slots import Rule, Slot, Update


def adamw(spec: OptimSpec) -> Rule:
    def apply(slots: Sequence[Slot], gradients: Sequence[Tensor], update: Update, weight_decay: float) -> None:
        run = _one_pass if use_kernel(slots[0].master) else _fused
        held = [
            number for number, slot in enumerate(slots) if slot.master.numel()
        ]  # a rank may have no part of a parameter
        if held:
            run([slots[n] for n in held], [gradients[n] for n in held], update, spec, weight_decay)

    return Rule(STATE["adamw"], apply)


def _one_pass(
    slots: Sequence[Slot], gradients: Sequence[Tensor], update: Update, spec: OptimSpec, weight_decay: float
) -> None:
    from argosy.train.adamw_kernel import Row, adamw_

    betas = torch.stack([torch.full_like(update.count, beta, dtype=torch.float64) for beta in spec.betas])
    adamw_(
        [
            Row(slot.part, slot.master, gradient, slot.state["exp_avg"], slot.state["exp_avg_sq"])
            for slot, gradient in zip(slots, gradients, strict=True)
        ],
        scale=update.scale,
        corrections=(1 - betas**update.count).float(),
        skip=update.skip,
        lr=update.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=weight_decay,
    )


def _fused(
    slots: Sequence[Slot], gradients: Sequence[Tensor], update: Update, spec: OptimSpec, weight_decay: float
) -> None:
    fused_adamw_(
        [slot.master for slot in slots],
        [gradient.float() for gradient in gradients],
        [slot.state["exp_avg"] for slot in slots],
        [slot.state["exp_avg_sq"] for slot in slots],
        step=update.count,
        divisor=1 / update.scale,
        skip=update.skip,
        lr=update.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=weight_decay,
    )
    if slots[0].separate:
        copy_([slot.part for slot in slots], [slot.master for slot in slots])

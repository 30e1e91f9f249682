"""The AdamW update of 32-bit master weights: one pass of a Triton kernel on a GPU, torch's fused update elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from argosy.compat import fused_adamw_
from argosy.config.optimizers.adamw import AdamWSpec
from argosy.model.ops.choice import use_kernel
from argosy.model.ops.largest import WEIGHT_PARTS, asks_update, note_weight
from argosy.train.slots import Apply, Slot, Update, write_parameters


def make_update(keys: AdamWSpec, model: nn.Module) -> Apply:
    def apply(slots: Sequence[Slot], gradients: Sequence[Tensor], update: Update, weight_decay: float) -> None:
        run = _one_pass if use_kernel(slots[0].master) else _fused
        # A rank may have an empty shard of a parameter.
        held = [number for number, slot in enumerate(slots) if slot.master.numel()]
        if held:
            run([slots[n] for n in held], [gradients[n] for n in held], update, keys, weight_decay)

    return apply


def _one_pass(
    slots: Sequence[Slot], gradients: Sequence[Tensor], update: Update, keys: AdamWSpec, weight_decay: float
) -> None:
    from argosy.train.adamw_kernel import adamw_kernel
    from argosy.train.update_kernel import launch

    betas = torch.stack([torch.full_like(update.count, beta, dtype=torch.float64) for beta in keys.betas])
    # Bias correction of both moments.
    corrections = (1 - betas**update.count).float()
    largest = _room_for_largest(slots)
    launch(
        adamw_kernel, slots, gradients, update.scale, corrections, update.skip,
        update.lr, *keys.betas, keys.eps, 1.0 - update.lr * weight_decay, largest=largest,
    )  # fmt: skip
    for slot, found in zip(slots, largest, strict=True):
        if found is not None:
            note_weight(slot.parameter, found)


def _room_for_largest(slots: Sequence[Slot]) -> list[Tensor | None]:
    """Return zeros for the largest magnitudes of each parameter that asks for them. FSDP's are shards of what a pass reads."""
    asking = [slot.part is slot.parameter and asks_update(slot.parameter) for slot in slots]
    rooms = iter(torch.zeros((sum(asking), WEIGHT_PARTS), device=slots[0].master.device).unbind())
    return [next(rooms) if asks else None for asks in asking]


def _fused(
    slots: Sequence[Slot], gradients: Sequence[Tensor], update: Update, keys: AdamWSpec, weight_decay: float
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
        betas=keys.betas,
        eps=keys.eps,
        weight_decay=weight_decay,
    )
    write_parameters(slots)

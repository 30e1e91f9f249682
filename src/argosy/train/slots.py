"""What an update rule works on: parameters with their 32-bit masters and what the rule remembers about each.

A rule is a function over many parameters at once, and the names of the tensors it keeps for each. Everything it is told
about the step that could make the host wait for the device is a tensor on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from argosy.parallel.shards import local


@dataclass(frozen=True)
class Slot:
    """One parameter. A 32-bit parameter is its own master. Where the parameter is spread over ranks, master and state are
    those of this rank's part."""

    name: str
    parameter: nn.Parameter
    master: Tensor
    state: dict[str, Tensor]

    @property
    def part(self) -> Tensor:
        """What this rank holds of the parameter, sharing its memory."""
        return local(self.parameter)

    @property
    def separate(self) -> bool:
        return self.parameter.dtype != self.master.dtype


@dataclass(frozen=True)
class Update:
    """One step, the same for all groups. The tensors are 0-dimensional, 32-bit and on the device."""

    lr: float
    scale: Tensor  # multiplies the gradients: the mean, and clipping
    skip: Tensor  # 1: change nothing, 0: go ahead
    count: Tensor  # updates made, with this one


class Rule(NamedTuple):
    state: tuple[str, ...]  # of tensors kept for each parameter, shaped like it
    apply: Callable[[Sequence[Slot], Sequence[Tensor], Update, float], None]  # slots, gradients, update, weight decay


@dataclass(frozen=True)
class Group:
    """Parameters that are updated by one rule, with one weight decay and one factor on the learning rate."""

    rule: Rule
    weight_decay: float
    lr_scale: float
    slots: list[Slot]

    def apply(self, update: Update) -> None:
        active = [slot for slot in self.slots if slot.parameter.grad is not None]
        gradients = [local(slot.parameter.grad) for slot in active if slot.parameter.grad is not None]
        if active:
            with torch.no_grad():
                self.rule.apply(active, gradients, replace(update, lr=update.lr * self.lr_scale), self.weight_decay)

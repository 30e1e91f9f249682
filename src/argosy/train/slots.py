"""What an optimiser's update works on: parameters with their 32-bit masters and the state its `Rule` declares.

An update is a function over many parameters at once. Everything it is told about the step that could make the host wait for the
device is a tensor on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from argosy.compat import copy_
from argosy.config.optimizer_rule import Rule
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


# (slots, their gradients as plain tensors, the step, weight decay): updates master, state and parameter of each slot in place.
Apply = Callable[[Sequence[Slot], Sequence[Tensor], Update, float], None]


class MakeUpdate(Protocol):
    """`make_update` of a rule's module: the rule's keys and the model to the update of its parameters."""

    def __call__(self, keys: Any, model: nn.Module) -> Apply: ...


def make_update_of(rule: Rule) -> MakeUpdate:
    """`make_update` in `<name>_update.py` beside this file, which is loaded only for a run that uses the rule."""
    make: MakeUpdate = import_module(f"argosy.train.{rule.name}_update").make_update
    return make


def write_parameters(slots: Sequence[Slot]) -> None:
    """Round the masters of one group to their parameters, unless each parameter is its own master."""
    if slots[0].separate:
        copy_([slot.part for slot in slots], [slot.master for slot in slots])


@dataclass(frozen=True)
class Group:
    """Parameters that are updated by one rule, with one weight decay and one factor on the learning rate."""

    update: Apply
    weight_decay: float
    lr_scale: float
    slots: list[Slot]

    def apply(self, update: Update) -> None:
        active = [slot for slot in self.slots if slot.parameter.grad is not None]
        gradients = [local(slot.parameter.grad) for slot in active if slot.parameter.grad is not None]
        if active:
            with torch.no_grad():
                self.update(active, gradients, replace(update, lr=update.lr * self.lr_scale), self.weight_decay)

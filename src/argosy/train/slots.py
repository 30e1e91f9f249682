"""Optimiser slots: parameters with their 32-bit master weights and the state that the update's `Rule` declares.

An update is a function over many parameters at once. Arguments that would make the host wait for the device are tensors on the
device.
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
    """One parameter with its master weight and state. A 32-bit parameter is its own master weight. If the parameter is sharded,
    master weight and state are those of this rank's shard."""

    name: str
    parameter: nn.Parameter
    master: Tensor
    state: dict[str, Tensor]

    @property
    def part(self) -> Tensor:
        """This rank's shard of the parameter, sharing its memory."""
        return local(self.parameter)

    @property
    def separate(self) -> bool:
        return self.parameter.dtype != self.master.dtype


@dataclass(frozen=True)
class Update:
    """The arguments of one step, the same for all groups. The tensors are 0-dimensional, 32-bit and on the device."""

    lr: float
    # The factor on the gradients, from the mean and from clipping.
    scale: Tensor
    # 1: change nothing. 0: update.
    skip: Tensor
    # The number of updates, this one included.
    count: Tensor


# Takes (slots, their gradients as plain tensors, the step, weight decay). Updates master weight, state and parameter of each slot
# in place.
Apply = Callable[[Sequence[Slot], Sequence[Tensor], Update, float], None]


class MakeUpdate(Protocol):
    """The type of `make_update` in a rule's module: it takes the rule's keys and the model, and returns the update."""

    def __call__(self, keys: Any, model: nn.Module) -> Apply: ...


def make_update_of(rule: Rule) -> MakeUpdate:
    """Return `make_update` of `<name>_update.py` beside this file, which is imported only for a run that uses the rule."""
    make: MakeUpdate = import_module(f"argosy.train.{rule.name}_update").make_update
    return make


def write_parameters(slots: Sequence[Slot]) -> None:
    """Cast the master weights of one group to their parameters, unless each parameter is its own master weight."""
    if slots[0].separate:
        copy_([slot.part for slot in slots], [slot.master for slot in slots])


@dataclass(frozen=True)
class Group:
    """A group of parameters with the same update rule, weight decay and factor on the learning rate."""

    update: Apply
    weight_decay: float
    lr_scale: float
    slots: list[Slot]

    def apply(self, update: Update) -> None:
        active = [slot for slot in self.slots if slot.parameter.grad is not None]
        gradients = [local(slot.parameter.grad) for slot in active if slot.parameter.grad is not None]
        if active:
            # Kernels and torch's fused update do not increment the version. It is incremented before the update, so that the update's own
            # notes are valid, and older ones are not.
            torch.autograd.graph.increment_version([slot.parameter for slot in active])
            with torch.no_grad():
                self.update(active, gradients, replace(update, lr=update.lr * self.lr_scale), self.weight_decay)

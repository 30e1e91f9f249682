"""The optimiser: 32-bit master weights, an update rule, decay on matrices only, clipping without a host sync.

The model computes with parameters in the training precision; the optimiser keeps the weights themselves, in 32 bits, and
writes the parameters from them after each update. Weights and state go to and come from a checkpoint by parameter name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from argosy.compat import total_norm
from argosy.config.schema import OptimSpec
from argosy.errors import ArgosyError
from argosy.train.adamw import adamw
from argosy.train.scaler import LossScaler
from argosy.train.slots import Group, Rule, Slot, Update


class Optimizer:
    def __init__(self, model: nn.Module, spec: OptimSpec) -> None:
        without = undecayed(model, spec.no_decay)
        rule = adamw(spec)
        self._slots = {name: _slot(name, p, rule) for name, p in model.named_parameters()}
        trained = [slot for slot in self._slots.values() if slot.parameter.requires_grad]
        self._groups = [
            Group(rule, decay, [slot for slot in trained if (slot.name in without) == bare])
            for decay, bare in ((spec.weight_decay, False), (0.0, True))
        ]
        self._clip = spec.clip
        first = next(iter(self._slots.values())).parameter
        self._updates = torch.zeros((), device=first.device)  # made: steps without those that were skipped
        self._steps = 0
        self._scaler = LossScaler(first.device) if first.dtype == torch.float16 else None

    def loss_scale(self, tokens: int) -> Tensor | float:
        """What a summed loss over about `tokens` tokens is to be multiplied with; the same is to be given to `step`."""
        return 1.0 if self._scaler is None else self._scaler.scale / tokens

    def step(self, *, tokens: int, lr: float, loss_scale: Tensor | float = 1.0) -> Tensor:
        """Divide the summed gradients by `tokens` and by their scale, clip, update, clear. Returns the norm before
        clipping."""
        parameters = [slot.parameter for slot in self._slots.values()]
        divisor = loss_scale * tokens
        norm = total_norm([p.grad for p in parameters if p.grad is not None]) / divisor
        clip = torch.ones_like(norm) if self._clip is None else (self._clip / (norm + 1e-6)).clamp(max=1.0)
        skip = torch.zeros_like(norm)
        if self._scaler is not None:
            skip = (~norm.isfinite()).float()
            self._scaler.update(skip)
        self._steps += 1
        self._updates += 1 - skip
        for group in self._groups:
            group.apply(Update(lr, clip / divisor, skip, self._updates))
        for parameter in parameters:
            parameter.grad = None
        return norm

    def weights(self) -> dict[str, Tensor]:
        """The 32-bit weights by parameter name."""
        return {name: slot.master for name, slot in self._slots.items()}

    @torch.no_grad()
    def set_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Masters and, from them, parameters."""
        for name, value in weights:
            slot = self._slots[name]
            slot.master.copy_(value)
            if slot.separate:
                slot.parameter.copy_(slot.master)

    def tensors(self) -> dict[str, Tensor]:
        """The state, as `exp_avg/<parameter>` and so on."""
        return {f"{key}/{slot.name}": value for slot in self._slots.values() for key, value in slot.state.items()}

    def numbers(self) -> dict[str, float]:
        """The rest of the state, read from the device."""
        return {"updates": float(self._updates)} | ({} if self._scaler is None else self._scaler.numbers())

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float], step: int) -> None:
        """What `tensors` and `numbers` gave after `step` steps."""
        for name, value in self.tensors().items():
            value.copy_(tensors[name])
        self._steps = step
        self._updates.fill_(numbers.get("updates", step))
        if self._scaler is not None:
            self._scaler.load(numbers)

    def report(self) -> dict[str, float]:
        """What a logged step says about loss scaling; waits for the device."""
        if self._scaler is None:
            return {}
        return {"loss_scale": float(self._scaler.scale), "skipped": self._steps - int(self._updates)}


def _slot(name: str, parameter: nn.Parameter, rule: Rule) -> Slot:
    master = parameter.detach() if parameter.dtype == torch.float32 else parameter.detach().float()
    state = {key: torch.zeros_like(master) for key in rule.state} if parameter.requires_grad else {}
    return Slot(name, parameter, master, state)


def undecayed(model: nn.Module, patterns: list[str]) -> set[str]:
    """Vectors (biases and norms), and what the patterns name."""
    names = [name for name, _ in model.named_parameters()]
    found = {name for name, p in model.named_parameters() if p.ndim < 2}
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise ArgosyError(
                "config.bad-value",
                f"the pattern {pattern!r} matches none of the {len(names)} parameters, such as {names[0]} and {names[-1]}",
                key="optim.no_decay",
                value=patterns,
                fix="use shell patterns on parameter names, as embed.* or *.bias",
            )
        found |= matched
    return found

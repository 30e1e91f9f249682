"""AdamW with decay on matrices only, gradient clipping without a host sync, and its state by parameter name."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from argosy.compat import multiply_
from argosy.config.schema import OptimSpec
from argosy.errors import ArgosyError

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Thin around torch's fused AdamW: names in, names out, one learning rate for all groups."""

    def __init__(self, model: nn.Module, spec: OptimSpec) -> None:
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = dict(model.named_parameters())
        without = undecayed(model, spec.no_decay)
        groups = [
            {"params": self._select(set(self._names) - without), "weight_decay": spec.weight_decay},
            {"params": self._select(without), "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True
        )
        self._clip = spec.clip

    def step(self, *, tokens: int, lr: float) -> Tensor:
        """Divide the summed gradients by `tokens`, clip, update, clear. Returns the norm before clipping."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients) / tokens
        scale = torch.ones_like(norm) if self._clip is None else (self._clip / (norm + 1e-6)).clamp(max=1.0)
        multiply_(gradients, scale / tokens)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """The moments, as `exp_avg/<parameter>` and `exp_avg_sq/<parameter>`."""
        state = self._adamw.state
        return {f"{m}/{name}": state[self._parameters[name]][m] for m in _MOMENTS for name in self._names}

    def tensor_names(self) -> set[str]:
        return {f"{m}/{name}" for m in _MOMENTS for name in self._names}

    def load(self, tensors: dict[str, Tensor], step: int) -> None:
        saved = self._adamw.state_dict()
        order = [name for group in self._adamw.param_groups for name in self._names_in(group["params"])]
        saved["state"] = {
            index: {"step": torch.tensor(float(step))} | {m: tensors[f"{m}/{name}"].clone() for m in _MOMENTS}
            for index, name in enumerate(order)
        }
        self._adamw.load_state_dict(saved)

    def _select(self, names: set[str]) -> list[nn.Parameter]:
        return [self._parameters[name] for name in self._names if name in names]

    def _names_in(self, parameters: list[nn.Parameter]) -> list[str]:
        names = {id(p): name for name, p in self._parameters.items()}
        return [names[id(p)] for p in parameters]


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

"""The optimiser: 32-bit master weights, an update rule, weight decay on matrices only, clipping without a host sync.

The model computes with parameters in the training precision. The optimiser keeps the master weights in 32 bits, and writes the
parameters from them after each update. Checkpoints hold weights and state by parameter name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from argosy.config.optimizer_rule import Rule
from argosy.config.refusals import did_you_mean
from argosy.config.schema import OptimSpec
from argosy.config.survival import GuardSpec
from argosy.errors import ArgosyError
from argosy.parallel.precision import DTYPES
from argosy.parallel.shards import local, norm_of, part_of, spread_like
from argosy.train.guard import MINIMUM, Guard, LossScaler
from argosy.train.slots import Group, Slot, Update, make_update_of

Norm = Callable[[Mapping[str, Tensor]], Tensor]


class Optimizer:
    """The optimiser of the parameters that this rank holds: master weights, state, update, clipping and skipped steps."""

    def __init__(
        self,
        model: nn.Module,
        spec: OptimSpec,
        *,
        scaled: bool | None = None,
        guard: GuardSpec | None = None,
        guessing: float = 0.0,
        names: Collection[str] | None = None,
    ) -> None:
        """Args:
        scaled: use loss scaling. None: use it if the parameters are fp16.
        guard: rules for skipping steps with a bad loss or gradient norm.
        guessing: the loss of a model that knows nothing, for the guard.
        names: the names of all parameters, if `model` is only a part, as in a pipeline.
        """
        require_matches(spec, names or [name for name, _ in model.named_parameters()])
        self._slots, self._groups = _group(model, spec)
        # A model may keep state that it changes itself. It is saved and loaded with the weights.
        self._fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
        self._clip = spec.clip
        first = next(iter(self._slots.values())).parameter
        # Updates made: steps without the skipped ones.
        self._updates = torch.zeros((), device=first.device)
        self._steps = 0
        # 1 if the last step was skipped, else 0.
        self.skip = torch.zeros_like(self._updates)
        scaled = first.dtype == torch.float16 if scaled is None else scaled
        self._scaler = LossScaler(first.device) if scaled else None
        self.guard = None if guard is None else Guard(guard, first.device, guessing=guessing)

    def loss_scale(self, tokens: int) -> Tensor | float:
        """Return the factor for a summed loss over about `tokens` tokens. Pass the same factor to `step`."""
        return 1.0 if self._scaler is None else self._scaler.scale / tokens

    def step(
        self,
        *,
        tokens: int | Tensor,
        lr: float,
        loss_scale: Tensor | float = 1.0,
        loss_sum: Tensor | None = None,
        samples: int = 1,
        step: int = 0,
        norm: Norm | None = None,
    ) -> Tensor:
        """Divide the summed gradients by `tokens` and their scale, clip them, update the weights, and clear the gradients.

        Args:
            loss_sum: the summed loss over `samples` samples, which the guard reads with the gradient norm.
            norm: computes the norm of all gradients, if this rank has only some of them.

        Returns:
            The gradient norm before clipping.
        """
        parameters = {name: slot.parameter for name, slot in self._slots.items()}
        divisor = loss_scale * tokens
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        found = norm_of(list(gradients.values())) if norm is None else norm(gradients)
        grad_norm = found / divisor
        clip = torch.ones_like(grad_norm) if self._clip is None else (self._clip / (grad_norm + 1e-6)).clamp(max=1.0)
        skip = torch.zeros_like(grad_norm)
        if self._scaler is not None:
            skip = (~grad_norm.isfinite()).float()
            self._scaler.update(skip)
        if self.guard is not None and loss_sum is not None:
            excused = torch.zeros_like(grad_norm, dtype=torch.bool)
            # A lower loss scale may still prevent the overflow.
            if self._scaler is not None:
                excused = (skip > 0) & (self._scaler.scale >= MINIMUM)
            skip = torch.maximum(skip, self.guard.judge(step, loss_sum / tokens, grad_norm, excused, samples))
        self._steps, self.skip = self._steps + 1, skip
        self._updates += 1 - skip
        for group in self._groups:
            group.apply(Update(lr, clip / divisor, skip, self._updates))
        for parameter in parameters.values():
            parameter.grad = None
        return grad_norm

    def weights(self) -> dict[str, Tensor]:
        """Return the 32-bit master weights by parameter name, sharded as the parameters are."""
        return {name: spread_like(slot.master, slot.parameter) for name, slot in self._slots.items()} | self._fixed

    @torch.no_grad()
    def set_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set the master weights and the parameters to this rank's shard of each weight, given whole."""
        masters = self.weights()
        for name, value in weights:
            local(masters[name]).copy_(part_of(value, masters[name]))
        self.write_parameters()

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Write the parameters from master weights that were changed from outside."""
        for slot in self._slots.values():
            if slot.separate:
                slot.part.copy_(slot.master)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state tensors, named `exp_avg/<parameter>` and so on, sharded as the parameters are."""
        return {
            f"{key}/{slot.name}": spread_like(value, slot.parameter)
            for slot in self._slots.values()
            for key, value in slot.state.items()
        }

    def numbers(self) -> dict[str, float]:
        """Return the scalars of the state, read from the device."""
        parts = [part.numbers() for part in (self._scaler, self.guard) if part is not None]
        return {"updates": float(self._updates)} | {name: value for part in parts for name, value in part.items()}

    def set_numbers(self, numbers: Mapping[str, float], step: int) -> None:
        """Load what `numbers` returned after `step` steps."""
        self._steps = step
        self._updates.fill_(numbers.get("updates", step))
        for part in (self._scaler, self.guard):
            if part is not None:
                part.load(numbers)

    def reset(self) -> None:
        """Reset all state except the weights."""
        for tensor in self.tensors().values():
            local(tensor).zero_()
        self.set_numbers({}, 0)

    def report(self) -> dict[str, float]:
        """Return the metrics of loss scaling and skipped steps for a logged step. Waits for the device."""
        skipped: dict[str, float] = {"skipped": self._steps - int(self._updates)}
        if self._scaler is None:
            return skipped if self.guard is not None and self.guard.skipped else {}
        return {"loss_scale": float(self._scaler.scale)} | skipped


def _group(model: nn.Module, spec: OptimSpec) -> tuple[dict[str, Slot], list[Group]]:
    """Return a slot for every trained parameter, and the groups of parameters with the same rule, decay and factor."""
    updates = {rule: make_update_of(rule)(rule.settings(spec), model) for rule in spec.rule.parts}
    matrices = hidden_matrices(model)
    without, factors = undecayed(model, spec.no_decay), lr_factors(model, spec.lr_scale)
    slots: dict[str, Slot] = {}
    groups: dict[tuple[Rule, float, float], Group] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rule = spec.rule.rule_for(hidden_matrix=name in matrices)
            decay, factor = 0.0 if name in without else spec.weight_decay, factors.get(name, 1.0)
            slots[name] = slot = _slot(name, parameter, rule)
            groups.setdefault((rule, decay, factor), Group(updates[rule], decay, factor, [])).slots.append(slot)
    return slots, list(groups.values())


def _slot(name: str, parameter: nn.Parameter, rule: Rule) -> Slot:
    part = local(parameter).detach()
    master = part if part.dtype == torch.float32 else part.float()
    state = {key: torch.zeros_like(master, dtype=DTYPES[dtype]) for key, dtype in rule.state.items()}
    return Slot(name, parameter, master, state)


def hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of the matrices inside the layers and stacks of them, without embeddings, output head, norms and biases."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name
        for name, parameter in model.named_parameters()
        if "layers" in name.split(".") and parameter.ndim >= 2 and id(parameter) not in embeddings
    }


def undecayed(model: nn.Module, patterns: list[str]) -> set[str]:
    """Return the names of parameters without weight decay: vectors (biases and norms), and those that a pattern matches."""
    vectors = {name for name, p in model.named_parameters() if p.ndim < 2}
    return vectors.union(*(_matching(model, pattern) for pattern in patterns))


def lr_factors(model: nn.Module, patterns: Mapping[str, float]) -> dict[str, float]:
    """Return the learning-rate factors of the parameters that a pattern matches. The first match counts."""
    factors: dict[str, float] = {}
    for pattern, factor in patterns.items():
        for name in _matching(model, pattern):
            factors.setdefault(name, factor)
    return factors


def _matching(model: nn.Module, pattern: str) -> set[str]:
    return {name for name, _ in model.named_parameters() if fnmatchcase(name, pattern)}


def require_matches(spec: OptimSpec, names: Collection[str]) -> None:
    """Refuse a pattern that matches no parameter of the model."""
    patterns = [("no_decay", pattern) for pattern in spec.no_decay] + [("lr_scale", p) for p in spec.lr_scale]
    for key, pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            first, *_, last = names
            close = did_you_mean(pattern, sorted({shape for name in names for shape in _shapes(name)}))
            raise ArgosyError(
                "config.bad-value",
                f"the pattern {pattern!r} matches none of the {len(names)} parameters, such as {first} and {last}",
                key=f"optim.{key}",
                value=pattern,
                fix=f"{close} " * (close is not None) + "use shell patterns on parameter names, as embed.* or *.bias",
            )


def _shapes(name: str) -> Iterator[str]:
    """Yield patterns that match a name, one for each of its words from either end. Layer numbers are not words."""
    words = name.split(".")
    yield from (".".join(words[: i + 1]) + ".*" for i in range(len(words) - 1) if not words[i].isdigit())
    yield from ("*." + ".".join(words[-i:]) for i in range(1, len(words)) if not words[-i].isdigit())

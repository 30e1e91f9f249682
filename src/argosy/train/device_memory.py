"""Where the memory of a training device goes: what is kept between steps, and what a step needs on top at its peak.

A model that is larger than its device by what it keeps alone is refused before it is built. On a CPU nothing else would: memory
is promised there that is not to be had, until the kernel ends some process, not always this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from argosy.config.counts import count_parameters
from argosy.config.schema import RunSpec
from argosy.config.state import least_state_bytes
from argosy.console.formats import digits
from argosy.errors import ArgosyError
from argosy.parallel.shards import local
from argosy.train.device import memory_of, peak_memory_gib
from argosy.train.optimizer import Optimizer


@dataclass(frozen=True)
class Memory:
    """In GiB. `rest` is the peak without the others: activations, logits, workspaces, and on a CPU the program itself."""

    peak: float
    parameters: float
    gradients: float
    optimiser: float

    @property
    def rest(self) -> float:
        return max(0.0, self.peak - self.parameters - self.gradients - self.optimiser)

    def __str__(self) -> str:
        unit, scale = ("GiB", 1) if self.peak >= 1 else ("MiB", 1024)
        peak, parameters, gradients, optimiser, rest = (
            digits(part * scale) for part in (self.peak, self.parameters, self.gradients, self.optimiser, self.rest)
        )
        return (
            f"{peak} {unit} at its peak: parameters {parameters}, gradients {gradients}, optimiser {optimiser}, "
            f"activations and the rest {rest}"
        )

    def as_dict(self) -> dict[str, float]:
        parts = {"parameters": self.parameters, "gradients": self.gradients, "optimiser": self.optimiser}
        return {key: round(value, 3) for key, value in ({"peak": self.peak} | parts | {"rest": self.rest}).items()}


def require_memory(spec: RunSpec, device: torch.device, *, ranks: int = 1) -> None:
    """Of weights, gradients and optimiser a rank keeps at least its share among the `ranks` of one replica."""
    parameters, whole = count_parameters(spec.model).total, least_state_bytes(spec.model, spec.optim.rule)
    need, there = whole / ranks, memory_of(device)
    if need > there:
        among = "" if ranks == 1 else f" over {ranks} ranks"
        raise ArgosyError(
            "device.out-of-memory",
            f"{parameters:,} parameters x {whole / parameters:.3g} bytes (weights, gradients, optimiser){among} are {need / 2**30:,.1f} GiB, before any "
            f"activation, and {'this machine' if device.type == 'cpu' else 'the GPU'} has {there / 2**30:,.1f}",
            key="model",
            value=spec.model.preset or spec.model.family,
            fix="a smaller model, or more ranks to share it (parallel.dp_shard, tp, pp); `argosy plan` finds a layout, and "
            "`argosy train --dry-run --world-size N` checks one for other machines",
        )


def measure_memory(model: nn.Module, optimizer: Optimizer, device: torch.device, *, accumulated: bool) -> Memory:
    """Once a step has been made. Gradients that are accumulated over micro-batches are 32-bit."""
    parameters = [local(p) for p in model.parameters()]
    trained = [local(p) for p in model.parameters() if p.requires_grad]
    shared = {p.untyped_storage().data_ptr() for p in parameters}  # a 32-bit parameter is its own master
    kept = [local(t) for t in (*optimizer.weights().values(), *optimizer.tensors().values())]
    return Memory(
        peak=peak_memory_gib(device),
        parameters=_gib(parameters),
        gradients=sum(p.numel() * (4 if accumulated else p.element_size()) for p in trained) / 2**30,
        optimiser=_gib(t for t in kept if t.untyped_storage().data_ptr() not in shared),
    )


def _gib(tensors: Iterable[Tensor]) -> float:
    return sum(t.numel() * t.element_size() for t in tensors) / 2**30

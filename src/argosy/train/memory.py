"""Where the memory of a training device goes: what is kept between steps, and what a step needs on top at its peak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from argosy.parallel.shards import local
from argosy.train.device import peak_memory_gib
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
        return (
            f"{self.peak:.2f} GiB at its peak: parameters {self.parameters:.2f}, gradients {self.gradients:.2f}, "
            f"optimiser {self.optimiser:.2f}, activations and the rest {self.rest:.2f}"
        )

    def as_dict(self) -> dict[str, float]:
        parts = {"parameters": self.parameters, "gradients": self.gradients, "optimiser": self.optimiser}
        return {key: round(value, 3) for key, value in ({"peak": self.peak} | parts | {"rest": self.rest}).items()}


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

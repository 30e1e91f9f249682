"""Fresh weights, the same for every layout: each parameter is drawn from a seed made of (run seed, its name)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from argosy.config.model import ModelSpec
from argosy.config.seeds import derive_seed

# The projections that write into the residual stream start smaller, so that its variance does not grow with depth.
_INTO_RESIDUAL = ("attn.out.weight", "mlp.down.weight")


def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, spec, seed))


def initial_value(name: str, shape: torch.Size, spec: ModelSpec, seed: int) -> Tensor:
    """The whole parameter in 32-bit floats on the CPU, whatever the device or layout it is for."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if name.split(".")[-2].endswith("norm"):
        return torch.ones(shape)
    std = spec.init_std
    if name.endswith(_INTO_RESIDUAL):
        std /= math.sqrt(2 * spec.layers)
    generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)

"""Low-rank adapters (LoRA): beside a frozen weight W [out, in], two small matrices A [rank, in] and B [out, rank] that are trained.

A layer computes x W^T + (x A^T) B^T alpha / rank. B begins at zero, so that a run begins with the model it starts from. With DoRA, each
output is divided by the norm of its row of W + B A alpha / rank and multiplied by a trained magnitude, which begins at the norm.

Adapters are parameters of the linear layer itself, `lora_a`, `lora_b` and `lora_magnitude`, and are cut over ranks as its weight is: those
that meet the cut dimension are cut, and of the others each rank has a part of the gradient.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from argosy.config.model import LoraSpec
from argosy.families.adapter_sizes import is_adapter
from argosy.model.layers import Linear


def add_adapters(model: nn.Module, lora: LoraSpec, targets: Collection[str]) -> None:
    """Give the linear layers of these names, in the blocks, their adapters, with uninitialised weights."""
    for path, module in model.named_modules():
        if isinstance(module, Linear) and "layers" in path.split(".") and path.rpartition(".")[2] in targets:
            module.lora_a = nn.Parameter(torch.empty(lora.rank, module.in_features))
            module.lora_b = nn.Parameter(torch.empty(module.out_features, lora.rank))
            module.lora_scale, module.dora = lora.scale, lora.dora
            if lora.dora:
                module.lora_magnitude = nn.Parameter(torch.empty(module.out_features))


def freeze_base(model: nn.Module) -> None:
    """Train the adapters only."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            parameter.requires_grad_(False)

"""Low-rank adapters (LoRA): beside a frozen weight W [out, in], two small matrices A [rank, in] and B [out, rank] that are trained.

A layer computes x W^T + (x A^T) B^T alpha / rank. B begins at zero, so that a run begins with the model it starts from. Adapters are
parameters of the linear layer itself, `lora_a` and `lora_b`, and are cut over ranks as its weight is: the one that meets the cut
dimension is cut, and of the other each rank has a part of the gradient.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from argosy.config.model import LoraSpec
from argosy.families.adapter_sizes import is_adapter
from argosy.model.layers import Linear


def add_adapters(model: nn.Module, lora: LoraSpec, targets: Collection[str]) -> None:
    """Give the linear layers of these names, in the blocks, their adapters, with uninitialised weights."""
    for path, module in model.named_modules():
        if isinstance(module, Linear) and "layers" in path.split(".") and path.rpartition(".")[2] in targets:
            module.lora_a = nn.Parameter(torch.empty(lora.rank, module.in_features))
            module.lora_b = nn.Parameter(torch.empty(module.out_features, lora.rank))
            module.lora_scale = lora.scale


def freeze_base(model: nn.Module) -> None:
    """Train the adapters only."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            parameter.requires_grad_(False)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + B A scale, computed in 32 bits, in the weight's dtype."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)

"""The precision a model computes in.

Parameters are kept on the device in the training precision, and everything computed from them follows: there is no
autocast. What needs more bits says so where it is computed (norms, rotary tables and losses are 32-bit inside), and the
optimiser keeps 32-bit masters. With fp8, parameters are bf16 and the products of the layers multiply 8-bit floats;
embeddings, norms and the head stay bf16.
"""

from __future__ import annotations

import torch
from torch import nn

from argosy.config.checks import FP8_ALIGNMENT
from argosy.errors import ArgosyError
from argosy.model.layers import Linear

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_FP8_CAPABILITY = (8, 9)  # Ada and Hopper are the first with 8-bit products


def choose_precision(asked: str, device: torch.device) -> str:
    """What `auto` stands for on a device; a refusal where the device cannot do what was asked for."""
    if asked == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    if asked == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ArgosyError(
            "device.unavailable",
            f"{torch.cuda.get_device_name(device)} has no 8-bit products: its compute capability is "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}, and they came with "
            f"{'.'.join(map(str, _FP8_CAPABILITY))}",
            key="train.precision",
            value=asked,
            fix="train.precision=bf16",
        )
    return asked


def apply_precision(model: nn.Module, precision: str) -> None:
    """Put the parameters into the training precision. What is not trained by gradients stays as it is: a model that keeps
    state, as the biases of experts, keeps it in the precision it chose."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[precision])
    if precision == "fp8":
        apply_fp8(model)


def apply_fp8(model: nn.Module) -> int:
    """Let the linear layers of the blocks multiply 8-bit floats, where both sizes allow it. Returns how many."""
    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, Linear)
        and "layers" in name.split(".")
        and module.in_features % FP8_ALIGNMENT == 0
        and module.out_features % FP8_ALIGNMENT == 0
    ]
    for module in found:
        module.fp8 = True
    return len(found)

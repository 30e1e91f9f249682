"""The precision a model computes in.

Mixed precision without autocast: parameters are on the device in the training precision, and everything computed from them
follows. Operations that need more bits cast where they compute (norms, rope tables and losses are 32-bit inside), and the
optimiser keeps 32-bit master weights. With fp8, parameters are bf16, and the matmuls of the layers and the two backward matmuls of
the output head multiply 8-bit floats. Embeddings, norms and logits stay bf16, so that a loss is not rounded to 8 bits.

A CPU may lack instructions for 16-bit floats. Training keeps the precision it was asked for and warns; evaluation and
sampling, whose precision was chosen for another device, use fp32 there.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from argosy import compat
from argosy.config.fp8_rules import fits_fp8, require_fp8_layers
from argosy.errors import ArgosyError
from argosy.families.adapter_sizes import is_adapter
from argosy.model.layers import Linear, Norm
from argosy.model.objective import Output

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# Ada and Hopper are the first with fp8 matmuls.
_FP8_CAPABILITY = (8, 9)
# Rows and columns of the matmul that is timed.
_SIDE = 48


def choose_precision(asked: str, device: torch.device) -> str:
    """Resolve `auto` for a device. Raise ArgosyError if the device cannot compute in the precision that was asked for."""
    if asked == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    if asked == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ArgosyError(
            "device.unavailable",
            f"{torch.cuda.get_device_name(device)} has no fp8 matmuls: its compute capability is "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}, and fp8 needs "
            f"{'.'.join(map(str, _FP8_CAPABILITY))}",
            key="train.precision",
            value=asked,
            fix="train.precision=bf16",
        )
    return asked


def evaluation_precision(asked: str, device: torch.device) -> str:
    """Return the precision to evaluate a model in that was trained with `asked`.

    fp8 is for training only: evaluation uses bf16. A CPU without kernels for 16-bit floats uses fp32."""
    chosen = choose_precision("bf16" if asked == "fp8" else asked, device)
    return "fp32" if _support(chosen, device) == "missing" else chosen


def recorded_precision(asked: str, device: torch.device) -> str:
    """Describe the precision for the run's record. Machines with the same arithmetic give the same words."""
    chosen = choose_precision(asked, device)
    support = _support(chosen, device)
    return chosen if support == "native" else f"{chosen} ({support} in this CPU)"


def slow_precision(asked: str, device: torch.device) -> str | None:
    """Return a warning, with the fix, if the precision is much slower than fp32 on this CPU; None otherwise."""
    chosen = choose_precision(asked, device)
    support = _support(chosen, device)
    if support == "native":
        return None
    dtype = _name(chosen)
    cost = "several times the time of fp32: oneDNN emulates them"
    if support == "missing":
        cost = f"many times the time of fp32: {_slowdown(chosen):.0f} times for a {_SIDE} x {_SIDE} matmul, more for larger ones"
    return f"{chosen} on this CPU, which has no {dtype} instructions, takes {cost}; train.precision=fp32 avoids it"


def _name(precision: str) -> str:
    return "bf16" if DTYPES[precision] == torch.bfloat16 else precision


def _support(precision: str, device: torch.device) -> str:
    """Return `native`, `emulated` or `missing`: the result of `compat.cpu_matmul_support`."""
    if device.type != "cpu" or precision == "fp32":
        return "native"
    return compat.cpu_matmul_support(DTYPES[precision])


def _slowdown(precision: str) -> float:
    """Return the time of a small matmul in a precision divided by its time in fp32, each the best of 5.

    The matmul is small enough for one thread: several threads wait for each other on a busy machine."""

    def best(dtype: torch.dtype) -> float:
        a, seconds = torch.ones(_SIDE, _SIDE, dtype=dtype), []
        for _ in range(5):
            started = time.perf_counter()
            a @ a
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    return best(DTYPES[precision]) / best(torch.float32)


def apply_precision(
    model: nn.Module, precision: str, *, masters: bool = False, frozen: bool = False, fp8_head: bool = True
) -> None:
    """Cast the parameters to the training precision.

    With `masters` they stay as they are, as master weights: FSDP casts them when it all-gathers them for a forward pass. With `frozen`
    only adapters are trained, and the base, which needs no master weights, is cast in any case. Without `fp8_head`, the output head
    stays in 16 bits: the gradient of DPO is the difference of two answers' gradients, in which rounding errors do not cancel.
    Parameters that have an update rule of their own, such as the router biases of experts, always keep their precision."""
    for name, parameter in model.named_parameters():
        stays = masters and (not frozen or is_adapter(name))
        if parameter.requires_grad and not stays:
            parameter.data = parameter.data.to(DTYPES[precision])
    if precision == "fp8":
        apply_fp8(model, head=fp8_head)


def apply_fp8(model: nn.Module, *, head: bool = True) -> None:
    """Enable fp8 matmuls in the linear layers of the blocks whose sizes allow it, and with `head` in the backward pass of the output
    head. Raise ArgosyError if no layer allows it."""
    linear = _linear_layers(model)
    for module in linear:
        module.fp8 = fits_fp8(module.in_features, module.out_features)
    for output in _outputs(model):
        output.fp8 = head and fits_fp8(output.width)
    for name, module in model.named_modules():
        if isinstance(module, Norm) and not name.endswith(("q_norm", "k_norm")):
            module.measured = True
    require_fp8_layers((module.in_features, module.out_features) for module in linear)


def describe_precision(model: nn.Module, precision: str) -> str:
    """Describe the precision for the first lines of a run: with fp8, also the number of layers and whether the head uses it."""
    if precision != "fp8":
        return precision
    linear = _linear_layers(model)
    head = ", and the backward pass of the output head" if any(output.fp8 for output in _outputs(model)) else ""
    return f"fp8 ({sum(module.fp8 for module in linear)} of the {len(linear)} linear layers in the blocks{head})"


def _outputs(model: nn.Module) -> list[Output]:
    return [module for module in model.modules() if isinstance(module, Output)]


def _linear_layers(model: nn.Module) -> list[Linear]:
    """Return the linear layers of the transformer blocks."""
    return [m for name, m in model.named_modules() if isinstance(m, Linear) and "layers" in name.split(".")]

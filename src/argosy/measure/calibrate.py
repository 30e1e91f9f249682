"""Calibration of the planner for this GPU: matmuls, attention and element-wise passes, timed at sizes that fill it, after
warm-up to its sustained clock. The planner's own constants for a GPU come from published runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from argosy.errors import ArgosyError
from argosy.model.attention import Mask, prepare_attention
from argosy.model.ops.fp8 import fp8_matmuls
from argosy.plan.hardware import Gpu, gpu_of_device
from argosy.plan.kernels import Rates, linear
from argosy.plan.layer import BACKWARD_ATTENTION
from argosy.train.device import name_of


@dataclass(frozen=True)
class Sizes:
    """The sizes of what is timed: large enough to fill a GPU. `seconds` is the time of each measurement."""

    tokens: int = 16_384
    width: int = 4096
    outputs: int = 14_336
    heads: int = 32
    head_dim: int = 128
    seq_len: int = 4096
    seconds: float = 1.0


@dataclass(frozen=True)
class Measured:
    """Measured rates as shares of a GPU's named peaks, as in `argosy.plan.calibration`. `narrow` (fp8) is None if the GPU has no
    fp8."""

    gpu: str
    torch: str
    product: float
    narrow: float | None
    attention: float
    memory: float

    def document(self) -> str:
        """Return the text of a calibration file for the planner."""
        shares = {"product": self.product, "narrow": self.narrow, "attention": self.attention, "memory": self.memory}
        return "\n".join([
            f"# Measured by `argosy bench --calibrate` on {self.gpu}, torch {self.torch}; shares of its peaks.",
            "constants:",
            *(f"  {kind}.{self.gpu}: {share:.3f}" for kind, share in shares.items() if share is not None),
            "",
        ])  # fmt: skip


def calibrate(device: torch.device) -> Measured:
    name = name_of(device)
    gpu = None if name is None else gpu_of_device(name)
    if gpu is None:
        raise ArgosyError(
            "device.unavailable",
            f"the planner has no peaks of {'this machine: it has no GPU' if name is None else name}",
            key="--calibrate",
            fix="run it on a GPU that `argosy plan` knows, or describe yours in a file and name that in ARGOSY_HARDWARE",
        )
    return measure(device, gpu, Sizes())


def measure(device: torch.device, gpu: Gpu, sizes: Sizes) -> Measured:
    sixteen = gpu.peak() * 1e12
    ideal = Rates(gpu.sms, sixteen, sixteen, sixteen, sixteen, gpu.bandwidth * 1e9)
    eight = gpu.peak("fp8") * 1e12 if "fp8" in gpu.dense else None
    x = torch.randn(sizes.tokens, sizes.width, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.randn(sizes.outputs, sizes.width, dtype=torch.bfloat16, device=device, requires_grad=True)
    expected = sum(linear(ideal, sizes.tokens, sizes.width, sizes.outputs))
    product = expected / paced(lambda: F.linear(x, weight), device, sizes.seconds)
    narrow = None
    if eight is not None:
        at_eight = sum(linear(replace(ideal, narrow=eight), sizes.tokens, sizes.width, sizes.outputs, narrow=True))
        narrow = at_eight / paced(lambda: fp8_matmuls(x, [weight], [None])[0], device, sizes.seconds)
    return Measured(
        gpu=gpu.name,
        torch=torch.__version__,
        product=product,
        narrow=narrow,
        attention=_attention_flops(sizes) / sixteen / _attention_seconds(device, sizes),
        memory=_bytes_per_second(device, sizes) / (gpu.bandwidth * 1e9),
    )


def _attention_flops(sizes: Sizes) -> float:
    """Return the FLOPs of forward and backward, causal: a query attends to half of the keys on average."""
    return (1 + BACKWARD_ATTENTION) * 4 * sizes.tokens * sizes.seq_len / 2 * sizes.heads * sizes.head_dim


def _attention_seconds(device: torch.device, sizes: Sizes) -> float:
    shape = (sizes.tokens // sizes.seq_len, sizes.heads, sizes.seq_len, sizes.head_dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3))
    attend = prepare_attention(Mask(causal=True), q, sizes.seq_len, sizes.head_dim)
    return paced(lambda: attend(q, k, v), device, sizes.seconds)


def _bytes_per_second(device: torch.device, sizes: Sizes) -> float:
    a, b, out = (torch.randn(sizes.tokens, sizes.outputs, device=device).bfloat16() for _ in range(3))

    def add() -> None:
        torch.add(a, b, out=out)

    return 3 * a.numel() * a.element_size() / paced(add, device, sizes.seconds)


def paced(work: Callable[[], torch.Tensor | None], device: torch.device, seconds: float) -> float:
    """Return the sustained seconds of `work`, with its backward pass if it returns a tensor. Only the second half is timed."""

    def once() -> None:
        result = work()
        if result is not None:
            result.backward(torch.ones_like(result))

    once()
    each = _timed(once, 2, device) / 2
    count = max(2, round(seconds / 2 / each))
    _timed(once, count, device)
    return _timed(once, count, device) / count


def _timed(work: Callable[[], None], count: int, device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    for _ in range(count):
        work()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

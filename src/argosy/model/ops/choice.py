"""The choice between an operation's two forms: the Triton kernel on a GPU, else plain torch.

`ARGOSY_KERNELS=torch` turns off all kernels but torch's. `ARGOSY_KERNELS=triton` uses the kernels on the CPU too, where they
run only under Triton's interpreter (`TRITON_INTERPRET=1`). That is slow; the tests use it to check kernels without a GPU. A
compiled model uses plain torch, which torch.compile fuses by itself, except for attention.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from argosy.errors import ArgosyError

T = TypeVar("T")

_CHOICES = ("auto", "torch", "triton")
_forced: list[bool] = []


class Gpu(NamedTuple):
    """What the choice of kernels depends on."""

    # The compute capability.
    capability: tuple[int, int]
    # Multiprocessors.
    processors: int


# The GPU that the meta device stands for.
_on_meta: list[Gpu] = []


def use_kernel(x: Tensor) -> bool:
    """Return whether the Triton form runs on `x`."""
    if _forced:
        return _forced[-1]
    if torch.compiler.is_compiling():
        return False
    return _available() and (x.is_cuda or _interpreted() or (bool(_on_meta) and x.is_meta))


def meta_as(gpu: Gpu) -> AbstractContextManager[None]:
    """Choose kernels for tensors on the meta device as if they were on this GPU. None can run: something has to take the launches."""
    return _inside(_on_meta, gpu)


def stood_for(device: torch.device) -> Gpu | None:
    """Return the GPU that a device stands for, if it is the meta device and stands for one."""
    return _on_meta[-1] if _on_meta and device.type == "meta" else None


def gpu_of(device: torch.device) -> Gpu:
    """Return what kernels are chosen by on a GPU."""
    return Gpu(torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count)


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU, or stands for one."""
    return device.type == "cuda" or stood_for(device) is not None


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None.

    Call it when a module is loaded: torch.compile cannot trace it.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def kernels(on: bool) -> AbstractContextManager[None]:
    """Force every operation inside to its Triton form, or to its torch form."""
    return _inside(_forced, on)


@contextmanager
def _inside(stack: list[T], value: T) -> Iterator[None]:
    stack.append(value)
    try:
        yield
    finally:
        stack.pop()


def gpu_refusal(device: torch.device, capabilities: tuple[int, ...]) -> str | None:
    """Return why kernels for these major compute capabilities of NVIDIA GPUs cannot run on a device, or None."""
    if not is_gpu(device) or torch.version.hip is not None:
        return "the kernels need an NVIDIA GPU"
    if only_torch():
        return "ARGOSY_KERNELS=torch"
    gpu = stood_for(device)
    found = (torch.cuda.get_device_capability(device) if gpu is None else gpu.capability)[0]
    wanted = " or ".join(map(str, capabilities))
    return None if found in capabilities else f"the kernels need compute capability {wanted}, and this GPU has {found}"


@cache
def _available() -> bool:
    return not only_torch() and importlib.util.find_spec("triton") is not None


@cache
def _interpreted() -> bool:
    """Return whether kernels run on the CPU too. Reading the environment at every operation takes 5% of a small model's pass."""
    return _asked() == "triton"


def only_torch() -> bool:
    """Return whether all kernels but torch's are turned off."""
    return _asked() == "torch"


def _asked() -> str:
    asked = os.environ.get("ARGOSY_KERNELS", "auto")
    if asked not in _CHOICES:
        raise ArgosyError(
            "config.bad-value",
            f"the kernels to use are one of {', '.join(_CHOICES)}",
            key="ARGOSY_KERNELS",
            value=asked,
            origin="environment",
            fix="ARGOSY_KERNELS=torch turns all kernels but torch's off; unset it for the default",
        )
    return asked

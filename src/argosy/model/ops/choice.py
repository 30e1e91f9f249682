"""The choice between an operation's two forms: the Triton kernel on a GPU, else plain torch.

`ARGOSY_KERNELS=torch` turns off all kernels but torch's. `ARGOSY_KERNELS=triton` uses the kernels on the CPU too, where they
run only under Triton's interpreter (`TRITON_INTERPRET=1`). That is slow; the tests use it to check kernels without a GPU. A
compiled model uses plain torch, which torch.compile fuses by itself, except for attention.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from argosy.errors import ArgosyError

_CHOICES = ("auto", "torch", "triton")
_forced: list[bool] = []


def use_kernel(x: Tensor) -> bool:
    """Return whether the Triton form runs on `x`."""
    if _forced:
        return _forced[-1]
    if torch.compiler.is_compiling():
        return False
    return _available() and (x.is_cuda or _interpreted())


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None.

    Call it when a module is loaded: torch.compile cannot trace it.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextmanager
def kernels(on: bool) -> Iterator[None]:
    """Force every operation inside to its Triton form, or to its torch form."""
    _forced.append(on)
    try:
        yield
    finally:
        _forced.pop()


def gpu_refusal(device: torch.device, capabilities: tuple[int, ...]) -> str | None:
    """Return why kernels for these major compute capabilities of NVIDIA GPUs cannot run on a device, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "the kernels need an NVIDIA GPU"
    if only_torch():
        return "ARGOSY_KERNELS=torch"
    found = torch.cuda.get_device_capability(device)[0]
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

"""Which of an operation's two forms runs: the Triton kernel where there is a GPU to run it, else plain torch.

`ARGOSY_KERNELS=torch` turns all kernels but torch's off; `ARGOSY_KERNELS=triton` asks for them also on the CPU, where they run only
under Triton's interpreter (`TRITON_INTERPRET=1`): slow, and how the tests check them without a GPU. A compiled model
uses plain torch, which the compiler fuses by itself, but for attention.
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
    """Whether the Triton form is to work on `x`."""
    if _forced:
        return _forced[-1]
    if torch.compiler.is_compiling():
        return False
    return _available() and (x.is_cuda or _asked() == "triton")


def installed(package: str) -> str | None:
    """The version of a package, or None. To be asked when a module is loaded: a compiler would trip over the question."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@contextmanager
def kernels(on: bool) -> Iterator[None]:
    """Inside, every operation takes the one form or the other."""
    _forced.append(on)
    try:
        yield
    finally:
        _forced.pop()


def gpu_refusal(device: torch.device, capabilities: tuple[int, ...]) -> str | None:
    """Why kernels for NVIDIA's GPUs of these compute capabilities, by their first number, cannot work here, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "needs a GPU of NVIDIA's"
    if only_torch():
        return "ARGOSY_KERNELS=torch"
    found = torch.cuda.get_device_capability(device)[0]
    wanted = " or ".join(map(str, capabilities))
    return None if found in capabilities else f"needs a GPU of compute capability {wanted}, and this has {found}"


@cache
def _available() -> bool:
    return not only_torch() and importlib.util.find_spec("triton") is not None


def only_torch() -> bool:
    """Whether all kernels but torch's are turned off."""
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

"""Attention by the kernels of the package flash-attn-4, if it is installed (the extra `flash`).

On Hopper they are faster than torch's own. Unlike cuDNN's, their backward pass can be deterministic, bit for bit.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from argosy.errors import ArgosyError
from argosy.extras import install_extra
from argosy.model.ops.choice import gpu_refusal, installed

if TYPE_CHECKING:
    from argosy.model.ops.attention_backends import Form

_PACKAGE = "flash-attn-4"
# Major compute capabilities: Hopper and data-centre Blackwell.
_CAPABILITIES = (9, 10)
_WIDEST_HEAD, _HEAD_STEP = 128, 8

INSTALLED: Final = installed(_PACKAGE)
NOT_INSTALLED: Final = f"{_PACKAGE} is not installed"


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why these kernels cannot run, or None. `NOT_INSTALLED` is the reason only if there is no other."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "needs 16-bit floats"
    if head_dim % _HEAD_STEP or head_dim > _WIDEST_HEAD:
        return f"needs heads of a multiple of {_HEAD_STEP}, {_WIDEST_HEAD} at most"
    return gpu_refusal(device, _CAPABILITIES) or (NOT_INSTALLED if INSTALLED is None else None)


def is_kernel(name: str) -> bool:
    """Return whether a kernel name in a profile is one of these kernels."""
    return "flash_attncute" in name


def title() -> str:
    """Return what to call these kernels in a report."""
    return f"{_PACKAGE} {INSTALLED}"


def forward(q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    out, lse = _interface().flash_attn_func(
        q, k, v, softmax_scale=form.scale, causal=form.causal, window_size=_window(form.window), return_lse=True
    )
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = _window(form.window)
    d_q, d_k, d_v = _interface()._flash_attn_bwd(
        q, k, v, out, d_out, lse, softmax_scale=form.scale, causal=form.causal, window_size_left=left,
        window_size_right=right, deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return d_q, d_k, d_v


def _window(window: int | None) -> tuple[int | None, int | None]:
    """Return the number of keys that a query sees before and after its own."""
    return (None, None) if window is None else (window - 1, 0)


@cache
def _interface() -> Any:
    try:
        return importlib.import_module("flash_attn.cute.interface")
    # OSError and RuntimeError are raised for shared libraries it cannot find.
    except (ImportError, OSError, RuntimeError) as error:
        raise ArgosyError(
            "device.broken-package",
            f"{_PACKAGE} {INSTALLED} is installed but cannot be loaded: {error}",
            fix=f"{install_extra('flash')} brings the parts it needs; ARGOSY_KERNELS=torch, or pip uninstall flash-attn-4, does without it",
        ) from error

"""Attention by the kernels of the package flash-attn-4, where it is installed (`pip install 'argosy[flash]'`).

On Hopper they are faster than what torch has, and unlike cuDNN's their backward pass can repeat bit for bit. They take heads
where the projections leave them, [batch, seq, heads, head_dim]. Here they are custom operators, which recompute may keep the
results of and a compiler takes whole.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from torch import Tensor

from argosy.errors import ArgosyError
from argosy.model.ops.choice import only_torch

_PACKAGE = "flash-attn-4"
_CAPABILITIES = (9, 10)  # by their first number: Hopper, and the Blackwell of data centres
_WIDEST_HEAD, _HEAD_STEP = 128, 8


def _version() -> str | None:
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:
        return None


INSTALLED: Final = _version()  # or None; asked for once, since a compiler would trip over the question


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why these kernels cannot work here, or None."""
    if device.type != "cuda":
        return "needs a GPU"
    if INSTALLED is None:
        return f"{_PACKAGE} is not installed"
    if only_torch():
        return "ARGOSY_KERNELS=torch"
    if torch.cuda.get_device_capability(device)[0] not in _CAPABILITIES:
        return "needs a GPU of compute capability 9 or 10"
    if dtype not in (torch.bfloat16, torch.float16):
        return "needs 16-bit floats"
    fits = head_dim % _HEAD_STEP == 0 and head_dim <= _WIDEST_HEAD
    return None if fits else f"needs heads of a multiple of {_HEAD_STEP}, {_WIDEST_HEAD} at most"


def is_kernel(name: str) -> bool:
    """Whether a profiler's name is that of one of these kernels."""
    return "flash_attncute" in name


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, scale: float | None
) -> Tensor:
    """Attention of q, k, v [batch, heads, seq, head_dim]. Where there are more keys than queries, the queries are the last."""
    by_token = (t.transpose(1, 2) for t in (q, k, v))
    out: Tensor = _Flash.apply(*by_token, causal, window, scale)
    return out.transpose(1, 2)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None
    ) -> Tensor:
        out: Tensor
        out, lse = forward_pass(q, k, v, causal, window, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.form = (causal, window, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        repeatable = torch.are_deterministic_algorithms_enabled()
        return *backward_pass(gradients[0], *ctx.saved_tensors, *ctx.form, repeatable), None, None, None


@torch.library.custom_op("argosy::flash_attention", mutates_args=())
def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """(result [batch, seq, heads, head_dim], logs of the sums of exponentials [batch, heads, seq])."""
    out, lse = _interface().flash_attn_func(
        q, k, v, softmax_scale=scale, causal=causal, window_size=_window(window), return_lse=True
    )
    return out, lse


@torch.library.custom_op("argosy::flash_attention_backward", mutates_args=())
def backward_pass(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
    repeatable: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = _window(window)
    d_q, d_k, d_v = _interface()._flash_attn_bwd(
        q, k, v, out, d_out, lse, softmax_scale=scale, causal=causal, window_size_left=left, window_size_right=right,
        deterministic=repeatable,
    )  # fmt: skip
    return d_q, d_k, d_v


@forward_pass.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seq), dtype=torch.float32)


@backward_pass.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


OPERATIONS = frozenset({torch.ops.argosy.flash_attention.default})


def _window(window: int | None) -> tuple[int | None, int | None]:
    """How many keys before and after its own a query sees."""
    return (None, None) if window is None else (window - 1, 0)


@cache
def _interface() -> Any:
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except (ImportError, OSError, RuntimeError) as error:  # the last two for libraries it cannot find
        raise ArgosyError(
            "device.broken-package",
            f"{_PACKAGE} {INSTALLED} is installed but cannot be loaded: {error}",
            fix="pip install 'argosy[flash]' brings the parts it needs; ARGOSY_KERNELS=torch, or pip uninstall flash-attn-4, does without it",
        ) from error

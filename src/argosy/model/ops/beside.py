"""The decision whether Argosy's matmul kernels for Hopper (`kernels/hopper_matmul.py`) can run, and fill the GPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from argosy.model.ops.hopper import gluon_refusal
from argosy.model.ops.matmul import filled, processors

# A tile of the kernels. Each of its 8 blocks of columns needs a step of 64 of the dimension that the factors share.
_TILE = (128, 256)
_LEAST_DEPTH = 512
# The versions of Triton with which the forms "product" and "heads" have run on a GPU. With the others they are only compiled.
_LATER_FORMS = ("3.6.",)
# The least part of the GPU that the tiles keep busy.
_LEAST_FILLED = 0.9


def may_serve(x: Tensor) -> bool:
    """Return whether the kernels can read x. Tells it before weights are looked at, which takes time where they are sharded."""
    return x.dtype == torch.bfloat16 and is_loadable(x) and _runs_on(x.device)


def is_loadable(x: Tensor) -> bool:
    """Return whether x lies in memory as TMA transfers need it."""
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def serves(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels can multiply by a weight [out, in] for the tokens of x [.., columns], which they read, and fill the GPU."""
    if not may_serve(x) or weight.dtype != x.dtype or not is_loadable(weight):
        return False
    width, depth = weight.shape
    return fits(x.device, x.numel() // x.shape[-1], depth, width)


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Return whether the forms of the kernels that only multiply, and those that turn heads, can multiply x [.., in] by a weight [out, in],
    and fill the GPU."""
    return _runs_later_forms_on(x.device) and serves(x, weight)


@cache
def _runs_on(device: torch.device) -> bool:
    return gluon_refusal(device) is None


@cache
def _runs_later_forms_on(device: torch.device) -> bool:
    return gluon_refusal(device, _LATER_FORMS) is None


@cache
def fits(device: torch.device, tokens: int, depth: int, width: int, *, factors: int = 1) -> bool:
    """Return whether the kernels can multiply [tokens, depth] by `factors` matrices [depth, width], and fill the GPU."""
    # Rows begin at multiples of 16 bytes. Triton reads and writes so many at a time only if it knows that their length is a multiple of 16.
    if not tokens or depth % 8 or width % 16 or depth < _LEAST_DEPTH:
        return False
    return filled(tokens, factors * width, _TILE, 1, processors(device)) >= _LEAST_FILLED

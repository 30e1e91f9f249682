"""Layer norm and RMS norm, alone or together with the residual sum they read.

`add_norm` is what a transformer does between two matrix products: add the last product and its bias to the residual
stream, and normalise the sum for the next. Apart, that is five passes over memory; together, four, and the gradients of
bias and norm come out of the same backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool) -> Tensor:
    if rms:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_norm(
    x: Tensor, y: Tensor, y_bias: Tensor | None, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool
) -> tuple[Tensor, Tensor]:
    """(x + y + y_bias, the norm of that)."""
    total = add(x, y, y_bias)
    return total, norm(total, weight, bias, eps=eps, rms=rms)


def add(x: Tensor, y: Tensor, y_bias: Tensor | None) -> Tensor:
    return x + y if y_bias is None else torch.add(x, y + y_bias)

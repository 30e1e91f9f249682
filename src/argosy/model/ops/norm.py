"""Layer norm and RMS norm, alone or fused with the residual sum they read.

`add_norm` is the step between two matmuls of a transformer: it adds the last matmul's output and its bias to the residual
stream, and normalises the sum for the next matmul. Separately these take five passes over memory; fused, four. One backward
pass gives the gradients of both the bias and the norm.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from argosy.model.ops.choice import use_kernel


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool, measured: bool = False) -> Tensor:
    return split_norm(x, weight, bias, eps=eps, rms=rms, measured=measured)[1]


def split_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, rms: bool, measured: bool = False
) -> tuple[Tensor, Tensor]:
    """Return x and its norm, the two branches of the residual stream.

    If both branches start here, one pass computes the gradient of x.

    Args:
        measured: matmuls in 8-bit floats read the norm and the gradient of x, of whose largest magnitudes the kernels note bounds.
    """
    if use_kernel(x):
        return _fused(x, None, None, weight, bias, eps, rms, measured)
    return x, _norm(x, weight, bias, eps, rms)


def add_norm(
    x: Tensor,
    y: Tensor,
    y_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    rms: bool,
    measured: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return x + y + y_bias and its norm. `measured` is explained at `split_norm`."""
    if use_kernel(x):
        return _fused(x, y, y_bias, weight, bias, eps, rms, measured)
    total = add(x, y, y_bias)
    return total, _norm(total, weight, bias, eps, rms)


def add(x: Tensor, y: Tensor, y_bias: Tensor | None) -> Tensor:
    """Return x + y + y_bias."""
    if y_bias is None:
        return x + y
    if use_kernel(x):
        from argosy.model.ops.kernels.norm_kernel import Add

        result: Tensor = Add.apply(x, y, y_bias)
        return result
    return x + (y + y_bias)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, rms: bool) -> Tensor:
    if weight.dtype != x.dtype:
        return _norm(x.to(weight.dtype), weight, bias, eps, rms).to(x.dtype)
    if rms:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _fused(
    x: Tensor,
    y: Tensor | None,
    y_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    measured: bool,
) -> tuple[Tensor, Tensor]:
    from argosy.model.ops.kernels.norm_kernel import AddNorm

    total, out = AddNorm.apply(x, y, y_bias, weight, bias, eps, rms, measured)
    return total, out

"""Several matrix products of one input, as the gate and the up projection of an MLP.

The gradients each product has for the input are added up by the products themselves, where plain autograd would write
every one out and add them afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.model.ops.choice import use_kernel


def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """x weight^T + bias for every weight [out, in] of x [.., in]."""
    if use_kernel(x) and len(weights) > 1:
        found: tuple[Tensor, ...] = _Products.apply(x, *weights)
        return tuple(y if bias is None else y + bias for y, bias in zip(found, biases, strict=True))
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, *weights = ctx.saved_tensors
        d_ys = [d_y.flatten(0, -2) for d_y in gradients]
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = d_ys[0] @ weights[0]
            for d_y, weight in zip(d_ys[1:], weights[1:], strict=True):
                d_x = d_x.addmm_(d_y, weight)
            d_x = d_x.view_as(x)
        rows = x.flatten(0, -2)
        d_weights = [
            d_y.t() @ rows if wanted else None for d_y, wanted in zip(d_ys, ctx.needs_input_grad[1:], strict=True)
        ]
        return d_x, *d_weights

"""A matmul's output added to the residual stream by the kernel that multiplies, on Hopper.

Otherwise the norm that follows reads the output and the stream, or at a block's end a pass of its own (`argosy.model.ops.norm`). The
output is rounded before it is added, as it is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from argosy.compat import gradient_dtype
from argosy.model.ops.beside import is_loadable
from argosy.model.ops.matmul import Products
from argosy.model.ops.token_sums import want_sums


def product_sum(stream: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return stream + x weight^T + bias. Call it only if `beside.serves` says so for the stream and the weight."""
    out: Tensor = _ProductSum.apply(x, weight, None, stream, bias)
    return out


class _ProductSum(Products):
    """The sum of a stream, a bias and the product of `Products`, which has no bias of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *factors: Any) -> Any:
        from argosy.model.ops.kernels.hopper_matmul import add_product

        weight, _, stream, bias = factors
        x = x if is_loadable(x) else x.clone(memory_format=torch.contiguous_format)
        Products.keep(ctx, x, (weight,))
        ctx.bias_dtype = None if bias is None else gradient_dtype(bias)
        out = add_product(stream.flatten(0, -2), x.flatten(0, -2), weight, bias).view(stream.shape)
        if ctx.needs_input_grad[4]:
            want_sums(out, out.shape[-1])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from argosy.model.ops.kernels.row_sums_kernel import bias_gradient

        d_bias = bias_gradient(gradients[0].contiguous(), ctx.bias_dtype) if ctx.needs_input_grad[4] else None
        return *Products.backward(ctx, *gradients), gradients[0], d_bias

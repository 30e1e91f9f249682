"""The query-key-value projection as a matmul in 8-bit floats. The pass that joins the three gradients also rounds them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from argosy.compat import gradient_dtype, scaled_mm
from argosy.model.ops.fp8 import FORWARD, quantise, quantise_weights, scaled_product
from argosy.model.ops.largest import want
from argosy.model.ops.matmul import now_or_later


class Fp8Heads(torch.autograd.Function):
    """Returns query, key and value as `argosy.model.ops.heads.project_heads` does, by kernels only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rope: tuple[Tensor, Tensor] | None,
        group: int,
        head_dim: int,
        apart: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from argosy.model.ops.kernels.heads_kernel import split

        x8, w8 = quantise(x, FORWARD), quantise_weights(weight)
        qkv = scaled_mm(x8.values, w8.values.t(), x8.scale, w8.scale, x.dtype, bias=bias, fast=True)
        ctx.save_for_backward(x8.transposed, x8.scale, w8.transposed, w8.scale)
        ctx.weight = weight
        ctx.form = (x.shape, x.dtype, rope, group, None if bias is None else gradient_dtype(bias))
        q, k, v = split(qkv.unflatten(0, x.shape[:-1]), rope, group, head_dim, apart)
        want(q)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from argosy.model.ops.kernels.heads_kernel import join_rounded

        x8t, x_scale, w8t, w_scale = ctx.saved_tensors
        shape, dtype, rope, group, bias_dtype = ctx.form
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d8, sums = join_rounded(gradients, rope, group, summed=bias_dtype if wants_bias else None)
        d_x = scaled_mm(d8.values, w8t.t(), d8.scale, w_scale, dtype).view(shape) if wants_x else None
        d_weight = None
        if wants_weight:
            factors = d8.transposed, x8t.t(), d8.scale, x_scale
            d_weight = now_or_later(ctx.weight, partial(scaled_product, factors, dtype))
        return d_x, d_weight, sums, None, None, None, None

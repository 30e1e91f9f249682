"""A gated MLP whose activation is computed beside its matmuls, in both passes, by Argosy's own Hopper kernels.

Matmul by matmul, a kernel of its own reads gate and up again and writes the activation. In the backward pass another one reads the
activation's gradient, gate and up, and writes their gradients. These kernels take as long as a tenth of the matmuls. Here the kernels that
multiply do it (`kernels/hopper_matmul.py`). Without a gate that does not make a step faster: an activation then has half as many
multiplications beside it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.model.ops.activation import INNER
from argosy.model.ops.beside import fits, is_loadable
from argosy.model.ops.matmul import Products, now_or_later, product


def serves_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> bool:
    """Return whether the kernels can compute this MLP, and fill the GPU, if they can read x (`may_serve`)."""
    if any(t.dtype != x.dtype or not is_loadable(t) for t in (gate, up, down)):
        return False
    hidden, width = down.shape
    # The forward pass has gate and up side by side.
    return all(fits(x.device, x.numel() // hidden, hidden, width, factors=factors) for factors in (2, 1))


def gated_mlp(x: Tensor, kind: str, gate: Tensor, up: Tensor, down: Tensor, stream: Tensor | None = None) -> Tensor:
    """Return (activation(x gate^T) x up^T) down^T for `swiglu` and `geglu`, added to the residual stream if there is one.

    Call it only if `may_serve` and `serves_mlp` say so, and `beside.serves` for the stream."""
    y_gate, y_up, value = _GatedProducts.apply(x, gate, up, None, None, INNER[kind])
    out: Tensor = _Down.apply(y_gate, y_up, value, down, INNER[kind], None if stream is None else stream.flatten(0, -2))
    return out.view(x.shape)


# Two functions, so that autograd frees what the backward pass of the first to run has read before the other begins.
class _GatedProducts(Products):
    """The products of an input with gate and up, as `Products` computes them, and their activation, which gets no gradient here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *factors: Any) -> tuple[Tensor, ...]:
        from argosy.model.ops.kernels.hopper_matmul import gated_products

        gate, up, *_, kind = factors
        Products.keep(ctx, x, (gate, up))
        # Or autograd would fill zeros for the activation's gradient, which nothing reads.
        ctx.set_materialize_grads(False)
        found = gated_products(x.flatten(0, -2), gate, up, kind)
        ctx.mark_non_differentiable(found[-1])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *Products.backward(ctx, *gradients[:2]), None


class _Down(torch.autograd.Function):
    """The down projection of an activation, added to a stream if there is one. Its backward pass goes on to the products that the
    activation is made of."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, value: Tensor, down: Tensor, kind: str, stream: Tensor | None
    ) -> Tensor:
        products = (gate, up) if any(ctx.needs_input_grad[:2]) else ()
        ctx.save_for_backward(value, down, *products)
        # The weight itself: the saved tensor may be a copy.
        ctx.weight, ctx.kind = down, kind
        if stream is None:
            return F.linear(value, down)
        from argosy.model.ops.kernels.hopper_matmul import add_product

        return add_product(stream, value, down, None)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from argosy.model.ops.kernels.hopper_matmul import gated_gradients

        value, down, *products = ctx.saved_tensors
        d_y = gradients[0] if is_loadable(gradients[0]) else gradients[0].clone(memory_format=torch.contiguous_format)
        d_gate = d_up = None
        if products:
            gate, up = products
            d_gate, d_up = gated_gradients(d_y, down, gate, up, ctx.kind)
        d_down = now_or_later(ctx.weight, partial(product, d_y, value)) if ctx.needs_input_grad[3] else None
        return d_gate, d_up, None, d_down, None, gradients[0] if ctx.needs_input_grad[5] else None

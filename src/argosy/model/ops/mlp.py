"""A gated MLP whose activation is computed beside its matmuls, in both passes, by Argosy's own Hopper kernels.

Matmul by matmul, a kernel of its own reads gate and up again and writes the activation. In the backward pass another one reads the
activation's gradient, gate and up, and writes their gradients. These kernels take as long as a tenth of the matmuls. Here the kernels that
multiply do it (`kernels/hopper_mlp.py`). Without a gate that does not make a step faster: an activation then has half as many
multiplications beside it.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.model.ops.activation import INNER
from argosy.model.ops.hopper import gluon_refusal
from argosy.model.ops.matmul import Products, filled, now_or_later, processors, product

# The versions of Triton that the kernels were measured with.
_MEASURED = ("3.6.", "3.7.")
# A tile of the kernels. Each of its 8 blocks of columns needs a step of 64 of the hidden dimension.
_TILE = (128, 256)
_LEAST_HIDDEN = 512
# The least part of the GPU that the tiles keep busy.
_LEAST_FILLED = 0.9


def may_serve(x: Tensor) -> bool:
    """Return whether the kernels can read x. Tells it before weights are looked at, which takes time where they are sharded."""
    return x.dtype == torch.bfloat16 and _is_loadable(x) and _runs_on(x.device)


def serves(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> bool:
    """Return whether the kernels can compute this MLP, and fill the GPU, if they can read x."""
    readable = all(t.dtype == x.dtype and _is_loadable(t) for t in (gate, up, down))
    return readable and _fits(x.device, x.numel() // x.shape[-1], *down.shape)


def _is_loadable(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % 16 == 0


@cache
def _runs_on(device: torch.device) -> bool:
    return gluon_refusal(device, _MEASURED) is None


@cache
def _fits(device: torch.device, tokens: int, hidden: int, width: int) -> bool:
    # Rows begin at multiples of 16 bytes. Triton reads and writes so many at a time only if it knows that their length is a multiple of 16.
    if not tokens or hidden % 8 or width % 16 or hidden < _LEAST_HIDDEN:
        return False
    # The forward pass has gate and up side by side.
    shares = (filled(tokens, columns, _TILE, 1, processors(device)) for columns in (2 * width, width))
    return min(shares) >= _LEAST_FILLED


def gated_mlp(x: Tensor, kind: str, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return (activation(x gate^T) x up^T) down^T for `swiglu` and `geglu`. Call it only if `may_serve` and `serves` say so."""
    y_gate, y_up, value = _GatedProducts.apply(x, gate, up, None, None, INNER[kind])
    out: Tensor = _Down.apply(y_gate, y_up, value, down, INNER[kind])
    return out.view(x.shape)


# Two functions, so that autograd frees what the backward pass of the first to run has read before the other begins.
class _GatedProducts(Products):
    """The products of an input with gate and up, as `Products` computes them, and their activation, which gets no gradient here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *factors: Any) -> tuple[Tensor, ...]:
        from argosy.model.ops.kernels.hopper_mlp import gated_products

        gate, up, *_, kind = factors
        Products.keep(ctx, x, (gate, up))
        found = gated_products(x.flatten(0, -2), gate, up, kind)
        ctx.mark_non_differentiable(found[-1])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *Products.backward(ctx, *gradients[:2]), None


class _Down(torch.autograd.Function):
    """The down projection of an activation. Its backward pass goes on to the products that the activation is made of."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, value: Tensor, down: Tensor, kind: str) -> Tensor:
        products = (gate, up) if any(ctx.needs_input_grad[:2]) else ()
        ctx.save_for_backward(value, down, *products)
        # The weight itself: the saved tensor may be a copy.
        ctx.weight, ctx.kind = down, kind
        return F.linear(value, down)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from argosy.model.ops.kernels.hopper_mlp import gated_gradients

        value, down, *products = ctx.saved_tensors
        d_y = gradients[0] if _is_loadable(gradients[0]) else gradients[0].clone(memory_format=torch.contiguous_format)
        d_gate = d_up = None
        if products:
            gate, up = products
            d_gate, d_up = gated_gradients(d_y, down, gate, up, ctx.kind)
        d_down = now_or_later(ctx.weight, partial(product, d_y, value)) if ctx.needs_input_grad[3] else None
        return d_gate, d_up, None, d_down, None

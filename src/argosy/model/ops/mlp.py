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
from argosy.model.ops.hopper import kernel_refusal
from argosy.model.ops.matmul import filled, input_gradient, listener_of, now_or_later, processors, product

# A tile of the kernels. Each of its 8 blocks of columns needs a step of 64 of the hidden dimension.
_TILE = (128, 256)
_LEAST_HIDDEN = 512
# The least part of the GPU that the tiles keep busy.
_LEAST_FILLED = 0.9


def serves(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> bool:
    """Return whether the kernels can compute this MLP, and fill the GPU."""
    tensors = x, gate, up, down
    whole = all(t.dtype == torch.bfloat16 and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
    return whole and _fits(x.device, x.numel() // x.shape[-1], *down.shape)


@cache
def _fits(device: torch.device, tokens: int, hidden: int, width: int) -> bool:
    if kernel_refusal(device) or hidden % 8 or width % 8 or hidden < _LEAST_HIDDEN:
        return False
    # The forward pass has gate and up side by side.
    shares = (filled(tokens, columns, _TILE, 1, processors(device)) for columns in (2 * width, width))
    return min(shares) >= _LEAST_FILLED


def gated_mlp(x: Tensor, kind: str, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return (activation(x gate^T) x up^T) down^T for `swiglu` and `geglu`. Call it only if `serves` says so."""
    found: Tensor = _GatedMLP.apply(x, INNER[kind], gate, up, down)
    return found


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        from argosy.model.ops.kernels.hopper_mlp import gated_products

        ctx.listener = listener_of(x)
        y_gate, y_up, value = gated_products(x.flatten(0, -2), gate, up, kind)
        ctx.save_for_backward(x, gate, up, down, y_gate, y_up, value)
        # The weights themselves: the saved tensors may be copies.
        ctx.weights, ctx.kind = (gate, up, down), kind
        return F.linear(value, down).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from argosy.model.ops.kernels.hopper_mlp import gated_gradients

        x, gate, up, down, y_gate, y_up, value = ctx.saved_tensors
        wants_x, _, *wanted = ctx.needs_input_grad
        rows, d_y = x.flatten(0, -2), gradients[0].flatten(0, -2).contiguous()
        # The gradients of the three products, and what each weight multiplied.
        d_products, multiplied = [d_y, d_y, d_y], (rows, rows, value)
        d_x = None
        if wants_x or any(wanted[:2]):
            d_products[:2] = gated_gradients(d_y, down, y_gate, y_up, ctx.kind)
        if wants_x:
            d_x = input_gradient(d_products[:2], (gate, up), x, ctx.listener)
        d_weights = [
            now_or_later(weight, partial(product, d, one)) if want else None
            for weight, d, one, want in zip(ctx.weights, d_products, multiplied, wanted, strict=True)
        ]
        return d_x, None, *d_weights

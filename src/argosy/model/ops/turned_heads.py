"""Queries, keys and values from the kernel that multiplies for them, with rope, on Hopper.

Otherwise a matmul writes all of them, and a pass of its own turns queries and keys (`kernels/heads_kernel.py`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from argosy.model.ops.beside import multiplies
from argosy.model.ops.matmul import Products

# Of a head's dimensions. Half a head is at least a block of columns of the kernel, and a head at most a tile.
_LEAST, _MOST = 64, 256


def serves_heads(x: Tensor, weight: Tensor, rope: tuple[Tensor, Tensor], head_dim: int) -> bool:
    """Return whether the kernel can multiply x by the weight of all heads, turn them, and fill the GPU."""
    whole = _LEAST <= head_dim <= _MOST and not head_dim & (head_dim - 1)
    return whole and all(table.is_contiguous() for table in rope) and multiplies(x, weight)


def turned_heads(
    x: Tensor, weight: Tensor, rope: tuple[Tensor, Tensor], group: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `argosy.model.ops.heads.project_heads` does. Call it only if `serves_heads` says so."""
    q, k, v = _TurnedHeads.apply(x, weight, None, rope, group, head_dim)
    return q, k, v


class _TurnedHeads(Products):
    """The product of an input with the weight of all heads, as `Products` computes it, split and turned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *factors: Any) -> tuple[Tensor, ...]:
        from argosy.model.ops.kernels.hopper_matmul import product_heads

        weight, _, rope, group, head_dim = factors
        Products.keep(ctx, x, (weight,))
        ctx.form = (rope, group)
        cos, sin = (table.flatten(0, 1) for table in rope)
        heads = product_heads(x.flatten(0, -2), weight, (cos, sin), group, head_dim)
        return tuple(t.view(*x.shape[:-1], -1, head_dim).transpose(1, 2) for t in heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from argosy.model.ops.kernels.heads_kernel import join

        rope, group = ctx.form
        d_product, _ = join(gradients, rope, group, summed=None)
        return *Products.backward(ctx, d_product), None, None, None

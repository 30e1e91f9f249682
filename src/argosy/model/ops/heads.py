"""Split the fused query-key-value projection into heads, and apply rope if the model has it.

The projection's columns are slots of one head each: for every KV head its query heads, its key, its value.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from argosy.model.ops.choice import use_kernel
from argosy.model.ops.fp8 import is_whole
from argosy.model.ops.fp8_heads import Fp8Heads
from argosy.model.ops.turned_heads import serves_heads, turned_heads

# cos and sin, 32-bit.
Rope = tuple[Tensor, Tensor]  # [1 or batch, seq, head_dim / 2] each


class Projection(Protocol):
    """A linear layer that adds only the bias its caller passes."""

    @property
    def bias(self) -> Tensor | None: ...
    @property
    def weight(self) -> Tensor: ...
    @property
    def fuses(self) -> bool: ...
    @property
    def plain(self) -> bool: ...
    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor: ...


def project_heads(
    qkv: Projection, x: Tensor, rope: Rope | None, *, group: int, head_dim: int, fused: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value [batch, heads, seq, head_dim] of x [batch, seq, hidden].

    Args:
        group: query heads per KV head.
        fused: the kernel that multiplies may apply rope.
    """
    bias = qkv.bias
    if use_kernel(x) and _power_of_two(head_dim):
        if qkv.fuses and is_whole(x):
            q, k, v = Fp8Heads.apply(x, qkv.weight, bias, rope, group, head_dim)
            return q, k, v
        if fused and qkv.plain and bias is None and rope is not None and serves_heads(x, qkv.weight, rope, head_dim):
            return turned_heads(x, qkv.weight, rope, group, head_dim)
        from argosy.model.ops.kernels.heads_kernel import SplitHeads

        # The matmul adds the bias at no cost. `SplitHeads` sums the bias gradient in its backward pass.
        product = qkv(x, None if bias is None else bias.detach())
        q, k, v = SplitHeads.apply(product, bias, rope, group, head_dim)
        return q, k, v
    return split_heads(qkv(x, bias), rope, group=group, head_dim=head_dim)


def split_heads(qkv: Tensor, rope: Rope | None, *, group: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = qkv.unflatten(-1, (-1, group + 2, head_dim))  # [batch, seq, kv_heads, group + 2, head_dim]
    if rope is None:
        parts = slots.split((group, 1, 1), dim=3)
    else:
        # Queries and keys are next to each other, and turned together.
        turned = _turn(slots[:, :, :, :-1], rope[0][:, :, None, None], rope[1][:, :, None, None])
        # A copy, or the values would keep the memory of what queries and keys were.
        parts = (*turned.split((group, 1), dim=3), slots[:, :, :, -1:].clone())
    q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in parts)
    return q, k, v


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Apply rope to each pair (i, i + head_dim / 2) of x [batch, heads, seq, head_dim]."""
    return _turn(x, rope[0][:, None], rope[1][:, None])


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _power_of_two(n: int) -> bool:
    return n > 1 and n & (n - 1) == 0

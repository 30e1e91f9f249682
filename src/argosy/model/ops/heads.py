"""From the fused query-key-value product to the heads attention works on, rotated where the model has rotary positions.

The product's columns are slots of one head each: for every key/value head its query heads, its key, its value.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from argosy.model.ops.choice import use_kernel

Rope = tuple[Tensor, Tensor]  # cos and sin, 32-bit, [1 or batch, seq, head_dim / 2]


class Projection(Protocol):
    """A linear layer that adds a bias only if it is handed one."""

    @property
    def bias(self) -> Tensor | None: ...
    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor: ...


def project_heads(
    qkv: Projection, x: Tensor, rope: Rope | None, *, group: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [batch, heads, seq, head_dim] of x [batch, seq, hidden]; `group` query heads share a key."""
    bias = qkv.bias
    if use_kernel(x) and _power_of_two(head_dim):
        from argosy.model.ops.kernels.heads_kernel import SplitHeads

        # The product adds the bias for nothing; its gradient is summed where the parts are joined again.
        product = qkv(x, None if bias is None else bias.detach())
        q, k, v = SplitHeads.apply(product, bias, rope, group, head_dim)
        return q, k, v
    return split_heads(qkv(x, bias), rope, group=group, head_dim=head_dim)


def split_heads(qkv: Tensor, rope: Rope | None, *, group: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = qkv.unflatten(-1, (-1, group + 2, head_dim))  # [batch, seq, kv_heads, group + 2, head_dim]
    q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in slots.split((group, 1, 1), dim=3))
    return (q, k, v) if rope is None else (rotate(q, rope), rotate(k, rope), v)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of x [batch, heads, seq, head_dim]."""
    cos, sin = rope[0][:, None], rope[1][:, None]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _power_of_two(n: int) -> bool:
    return n > 1 and n & (n - 1) == 0

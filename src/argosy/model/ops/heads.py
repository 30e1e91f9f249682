"""Split the fused query-key-value projection into heads, and apply rope if the model has it.

The projection's columns are slots of one head each: for every KV head its query heads, its key, its value.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from argosy.model.ops.beside import may_serve
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
    qkv: Projection, x: Tensor, rope: Rope | None, *, group: int, head_dim: int, apart: bool = False, fused: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value [batch, heads, seq, head_dim] of x [batch, seq, hidden].

    If one of them is a copy of its part of the projection, such as queries that rope has turned, none of them is a view of the projection:
    the view would keep the memory of the whole until the backward pass.

    Args:
        group: query heads per KV head.
        apart: the caller copies queries and keys, so values must be a copy too.
        fused: the kernel that multiplies may apply rope.
    """
    bias = qkv.bias
    if use_kernel(x) and _power_of_two(head_dim):
        if qkv.fuses and is_whole(x):
            q, k, v = Fp8Heads.apply(x, qkv.weight, bias, rope, group, head_dim, apart)
            return q, k, v
        # Whether the kernel can read x is asked first: reading a sharded weight takes time.
        if fused and qkv.plain and bias is None and rope is not None and may_serve(x):
            weight = qkv.weight
            if serves_heads(x, weight, rope, head_dim):
                return turned_heads(x, weight, rope, group, head_dim)
        from argosy.model.ops.kernels.heads_kernel import SplitHeads

        # The matmul adds the bias at no cost. `SplitHeads` sums the bias gradient in its backward pass.
        product = qkv(x, None if bias is None else bias.detach())
        q, k, v = SplitHeads.apply(product, bias, rope, group, head_dim, apart)
        return q, k, v
    return split_heads(qkv(x, bias), rope, group=group, head_dim=head_dim, apart=apart)


def split_heads(
    qkv: Tensor, rope: Rope | None, *, group: int, head_dim: int, apart: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    slots = qkv.unflatten(-1, (-1, group + 2, head_dim))  # [batch, seq, kv_heads, group + 2, head_dim]
    if rope is None:
        q, k, v = slots.split((group, 1, 1), dim=3)
    else:
        # Queries and keys are next to each other, and turned together.
        turned = _turn(slots[:, :, :, :-1], rope[0][:, :, None, None], rope[1][:, :, None, None])
        q, k = turned.split((group, 1), dim=3)
        v = slots[:, :, :, -1:]
    return heads_of(q, k, v, apart=apart or rope is not None)


def heads_of(q: Tensor, k: Tensor, v: Tensor, *, apart: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads [batch, heads, seq, head_dim] in slots [batch, seq, kv_heads, slots, head_dim] of one tensor, or of two.

    If several KV heads have several query heads each, queries are copied, since no stride goes through them, and keys and values are copied
    too: views would keep the memory of the whole tensor. With `apart`, values are copied in any case.
    """
    copied = q.shape[2] > 1 and q.shape[3] > 1
    q, k, v = (part.flatten(2, 3) for part in (q, k, v))
    k = k.contiguous() if copied else k
    v = v.contiguous() if copied or apart else v
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Apply rope to each pair (i, i + head_dim / 2) of x [batch, heads, seq, head_dim]."""
    return _turn(x, rope[0][:, None], rope[1][:, None])


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _power_of_two(n: int) -> bool:
    return n > 1 and n & (n - 1) == 0

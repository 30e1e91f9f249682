"""Tokens to the rows their experts read, sorted by expert, and back.

A token that goes to k experts is k rows. Every step here has a fixed shape and leaves its result on the device, and a
gradient is gathered, never scattered, so that it does not depend on the order threads happen to finish in: the rows of a
token are summed from where the permutation says they are, in the order of its experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from argosy.model.ops.choice import use_kernel


class Permutation(NamedTuple):
    """Of the (token, expert) pairs, numbered token x k + place among the token's experts."""

    order: Tensor  # the pair each row is  # [rows]
    rows: Tensor  # the row each pair is  # [tokens, k]
    offsets: Tensor  # where the rows of each expert end, 32-bit integers  # [experts]

    @property
    def load(self) -> Tensor:
        """Rows of each expert. [experts]"""
        return self.offsets.diff(prepend=self.offsets.new_zeros(1)).long()


def sort_by_expert(chosen: Tensor, experts: int) -> Permutation:
    """For `chosen` [tokens, k], the experts of each token. Within an expert, rows keep the order of the tokens."""
    sorted_ids, order = chosen.flatten().sort(stable=True)
    every = torch.arange(experts, device=chosen.device, dtype=sorted_ids.dtype)
    offsets = torch.searchsorted(sorted_ids, every, right=True, out_int32=True)
    return Permutation(order, order.argsort().view(chosen.shape), offsets)


def dispatch(x: Tensor, permutation: Permutation) -> Tensor:
    """The row of each (token, expert) pair: [tokens, width] -> [rows, width]."""
    rows: Tensor = _GatherSum.apply(x, permutation.order[:, None] // permutation.rows.shape[1], permutation.rows)
    return rows


def combine(y: Tensor, permutation: Permutation) -> Tensor:
    """The sum of each token's rows: [rows, width] -> [tokens, width]."""
    k = permutation.rows.shape[1]
    sums: Tensor = _GatherSum.apply(y, permutation.rows, permutation.order[:, None] // k)
    return sums


def sort_weights(weights: Tensor, permutation: Permutation) -> Tensor:
    """The weight of each row, from those of the pairs [tokens, k]."""
    rows: Tensor = _GatherSum.apply(weights.view(-1, 1), permutation.order[:, None], permutation.rows.view(-1, 1))
    return rows[:, 0]


class _GatherSum(torch.autograd.Function):
    """out[i] = sum of source[index[i]]; `back` is the index with which the gradient is the same operation."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return gather_sum(source, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (back,) = ctx.saved_tensors
        return gather_sum(gradients[0].contiguous(), back), None, None


def gather_sum(source: Tensor, index: Tensor) -> Tensor:
    """For each i the sum over j of source[index[i, j]]: [rows, width] and [n, j] -> [n, width]."""
    if source.shape[1] > 1 and use_kernel(source):
        from argosy.model.ops.kernels.permute_kernel import gather_sum as fused

        return fused(source, index)
    picked = source.index_select(0, index.flatten())
    return picked if index.shape[1] == 1 else picked.view(*index.shape, -1).sum(1)

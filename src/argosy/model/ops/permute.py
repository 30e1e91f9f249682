"""Permute tokens to rows sorted by expert, and back.

A token that goes to k experts becomes k rows. Every step has a fixed shape and leaves its result on the device. Gradients are
gathered, never scattered, so they do not depend on the order in which threads finish: a token's rows are summed in the order
of its experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from argosy.model.ops.choice import use_kernel


class Permutation(NamedTuple):
    """A permutation of the (token, expert) pairs, numbered token x k + place among the token's experts."""

    # The pair of each row.
    order: Tensor  # [rows]
    # The row of each pair.
    rows: Tensor  # [tokens, k]
    # Where the rows of each expert end, 32-bit integers.
    offsets: Tensor  # [experts]

    @property
    def load(self) -> Tensor:
        """The number of rows of each expert. [experts]"""
        return self.offsets.diff(prepend=self.offsets.new_zeros(1)).long()


def sort_by_expert(chosen: Tensor, experts: int) -> Permutation:
    """Return the permutation that sorts pairs by expert. Within an expert, rows keep the order of the tokens.

    Args:
        chosen: [tokens, k], the experts of each token.
    """
    sorted_ids, order = chosen.flatten().sort(stable=True)
    every = torch.arange(experts, device=chosen.device, dtype=sorted_ids.dtype)
    offsets = torch.searchsorted(sorted_ids, every, right=True, out_int32=True)
    return Permutation(order, order.argsort().view(chosen.shape), offsets)


def dispatch(x: Tensor, permutation: Permutation) -> Tensor:
    """Copy each token to the rows of its experts: [tokens, width] -> [rows, width]."""
    rows: Tensor = _GatherSum.apply(x, permutation.order[:, None] // permutation.rows.shape[1], permutation.rows)
    return rows


def combine(y: Tensor, permutation: Permutation) -> Tensor:
    """Sum the rows of each token: [rows, width] -> [tokens, width]."""
    k = permutation.rows.shape[1]
    sums: Tensor = _GatherSum.apply(y, permutation.rows, permutation.order[:, None] // k)
    return sums


def sort_weights(weights: Tensor, permutation: Permutation) -> Tensor:
    """Return the weight of each row, given the weights of the pairs [tokens, k]."""
    rows: Tensor = _GatherSum.apply(weights.view(-1, 1), permutation.order[:, None], permutation.rows.view(-1, 1))
    return rows[:, 0]


class _GatherSum(torch.autograd.Function):
    """Computes out[i] = sum of source[index[i]]. The gradient is the same operation with the index `back`."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return gather_sum(source, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (back,) = ctx.saved_tensors
        return gather_sum(gradients[0].contiguous(), back), None, None


def gather_sum(source: Tensor, index: Tensor) -> Tensor:
    """Return the sum over j of source[index[i, j]] for each i: [rows, width] and [n, j] -> [n, width]."""
    if source.shape[1] > 1 and use_kernel(source):
        from argosy.model.ops.kernels.permute_kernel import gather_sum as fused

        return fused(source, index)
    picked = source.index_select(0, index.flatten())
    return picked if index.shape[1] == 1 else picked.view(*index.shape, -1).sum(1)

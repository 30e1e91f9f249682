"""Rows of a table, by number. Backward, the gradients of a row's many uses are added up, in the same order every time."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from argosy.model.ops.choice import use_kernel


def embed(numbers: Tensor, weight: Tensor) -> Tensor:
    """weight[numbers], of weight [rows, width]."""
    if use_kernel(weight):
        from argosy.model.ops.kernels.embedding_kernel import Embed

        result: Tensor = Embed.apply(numbers, weight)
        return result
    return F.embedding(numbers, weight)

"""A weight W [out, in] and its low-rank adapters, A [rank, in] and B [out, rank], as one matrix: W + scale B A.

With DoRA the rows of this matrix have norms of their own, the trained magnitudes: magnitude (W + scale B A) / |W + scale B A|.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """Return the weight with its adapters, computed in 32 bits, in the weight's dtype."""
    found = weight.float() + scale * (b.float() @ a.float())
    if magnitude is not None:
        found *= (magnitude.float() / nonzero(row_norms(found)))[:, None]
    return found.to(weight.dtype)


def row_norms(weight: Tensor) -> Tensor:
    """Return the norm of every row of a matrix, in 32 bits."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
    return norms


def nonzero(norms: Tensor) -> Tensor:
    """Return the norms as divisors. A row of zeros has a magnitude of zero, and their quotient is zero then."""
    return norms.clamp_min(torch.finfo(norms.dtype).tiny)


def squared_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the squared norms of the rows of W + scale B A [out], in 32 bits.

    They are expanded into |w|^2 + 2 scale b . (A w) + scale^2 b . (A A^T b), so that no matrix of the weight's size is made. Each term is a
    sum over the inputs: ranks that have some of the inputs get parts of it.
    """
    wide_a, wide_b = a.float(), b.float()
    crossed = 2 * scale * (weight @ a.t()).float() + scale * scale * (wide_b @ (wide_a @ wide_a.t()))
    return row_norms(weight).square() + (wide_b * crossed).sum(1)

"""Batches in page-locked memory: a GPU fetches from it by itself, while the processor goes on.

The copy is made in the loader's thread. Memory comes from torch's own pool, which notes every transfer that reads a
tensor, by whichever slice of it, and gives the memory to no one before those have ended; so a batch may be let go as
soon as its transfers are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from argosy.data.samples.windows import Batch


@dataclass(frozen=True)
class TensorBatch(Batch):
    """A batch whose arrays are views of these tensors."""

    tensors: dict[str, Tensor] = field(default_factory=dict)


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Tokens, labels and all inputs by name, on the host, without a copy."""
    if isinstance(batch, TensorBatch):
        return batch.tensors
    arrays = {"tokens": batch.tokens, "labels": batch.labels, **batch.inputs}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def copied(batch: Batch, *, pinned: bool) -> TensorBatch:
    """A contiguous copy of a batch, page-locked or not."""
    tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)
        for name, tensor in tensors_of(batch).items()
    }
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return TensorBatch(arrays.pop("tokens"), arrays.pop("labels"), arrays, tensors)

"""Sums of gradients over ranks that each hold a whole model: once a step, in pieces large enough to be worth sending."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.compat import copy_

_BUCKET = 64 * 2**20  # bytes sent at once


def sum_gradients(model: nn.Module, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Replace every gradient by its sum over the group, sent as `dtype`."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for bucket in _buckets(gradients, _BUCKET // dtype.itemsize):
        flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        parts = flat.split([gradient.numel() for gradient in bucket])
        copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])


def _buckets(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > most:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket

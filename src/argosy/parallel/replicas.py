"""Ranks that hold the same parameters: the all-reduce of their gradients, once a step and in buckets, and a check that the
replicas still hold the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.compat import copy_
from argosy.parallel.shards import local

_BUCKET = 64 * 2**20  # bytes


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """All-reduce every gradient over the group in place, sent as `dtype`."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    for bucket in _buckets(gradients, _BUCKET // dtype.itemsize):
        flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        parts = flat.split([gradient.numel() for gradient in bucket])
        copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])


def odd_replicas(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a group of replicas whose bits differ from the most common ones; all ranks if no two agree.

    Waits for the device."""
    digest = _digest(parameters)
    found = [torch.empty_like(digest) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, digest, group=group)
    digests = [int(one) for one in found]
    usual, times = Counter(digests).most_common(1)[0]
    ranks = dist.get_process_group_ranks(group)
    return [r for r, d in zip(ranks, digests, strict=True) if d != usual or (times == 1 and len(ranks) > 1)]


def _digest(parameters: Iterable[Tensor]) -> Tensor:
    """Return a checksum that any flipped bit changes. It sums integers, because sums of floats depend on the order."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [p.detach().contiguous().view(kinds[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
    # Odd factors lose no bit.
    places = torch.arange(1, 2 * len(sums), 2, device=sums[0].device)
    return (torch.stack(sums) * places).sum()


def _buckets(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > most:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket

"""Ranks that hold the same parameters: the all-reduces of their gradients, and a check that the replicas still hold the same bits.

Gradients are summed once a step, in buckets, while the last backward pass runs: a bucket's all-reduce is launched as soon as the last
gradient of each of its parameters is there. If that pass is replayed as a CUDA graph, they are summed after it. Buckets and their order depend on the model alone, so that all ranks launch the same
all-reduces in the same order, and a repeated or resumed step gives the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.compat import copy_
from argosy.parallel.shards import local, spread_like

# Bytes. The last bucket of a step has nothing to overlap with, so that a small model has smaller buckets: about `_BUCKETS`.
_LARGEST_BUCKET, _SMALLEST_BUCKET, _BUCKETS = 64 * 2**20, 2**20, 16
# Buckets that are summed in place at a time: the next is put together while one is summed.
_IN_FLIGHT = 2
# Bytes. Gradients in a bucket begin at multiples of it, for kernels that load several elements at once.
_ALIGNMENT = 16


class _Sum(NamedTuple):
    """An all-reduce that was launched."""

    work: Any
    # What is being summed: not freed before the sum is there.
    flat: Tensor
    # Gradients of another dtype, and their parts of `flat`.
    copies: list[tuple[Tensor, Tensor]]


class GradientSums:
    """The all-reduces of the gradients of some parameters over a group of ranks, sent as `dtype`.

    `arm` and `complete` say which gradients of a step are the last ones. Those of which neither was said are summed by `finish`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        # The backward pass goes through a model from its end.
        trained = [parameter for parameter in parameters if parameter.requires_grad][::-1]
        total = sum(local(parameter).numel() for parameter in trained) * dtype.itemsize
        most = min(_LARGEST_BUCKET, max(_SMALLEST_BUCKET, total // _BUCKETS)) // dtype.itemsize
        self._group, self._dtype = group, dtype
        self._buckets = list(_buckets(trained, most))
        self._bucket_of = {parameter: n for n, bucket in enumerate(self._buckets) for parameter in bucket}
        self._hooked = False
        self._begin()

    def arm(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Take the next gradient of each of the parameters, by default all, as its last of the step."""
        if not self._hooked:
            self._hooked = True
            # A parameter's hooks are out of the garbage collector's sight: one that held this object would keep the model and the group.
            arrived = WeakMethod(self._arrived)
            for parameter in self._bucket_of:
                parameter.register_post_accumulate_grad_hook(lambda p: None if (call := arrived()) is None else call(p))
        self._armed.update(self._bucket_of if parameters is None else parameters)

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the gradients that the parameters have now as those of the step."""
        for parameter in parameters:
            if parameter in self._missing:
                del self._missing[parameter]
                self._counts[self._bucket_of[parameter]] -= 1
        self._launch()

    def finish(self, *, in_place: bool = False) -> None:
        """Sum what was not summed yet, and make the device wait for all sums of the step. The host waits for gloo only.

        Args:
            in_place: sum few buckets at a time, and copy them to where their gradients are. A CUDA graph keeps their memory, which would not be
                free if the sums became the gradients.
        """
        self._in_place = in_place
        self.complete(list(self._missing))
        self._settle()
        self._begin()

    def _begin(self) -> None:
        self._armed: set[nn.Parameter] = set()
        # Parameters whose gradient may still change, and how many each bucket has of them.
        self._missing = dict.fromkeys(self._bucket_of)
        self._counts = [len(bucket) for bucket in self._buckets]
        self._launched = 0
        self._sums: list[_Sum] = []
        self._in_place = False

    def _arrived(self, parameter: nn.Parameter) -> None:
        if parameter in self._armed:
            self.complete((parameter,))

    @torch.no_grad()
    def _launch(self) -> None:
        """Launch the all-reduces of complete buckets, in order: a bucket waits for those before it."""
        while self._launched < len(self._buckets) and not self._counts[self._launched]:
            bucket = self._buckets[self._launched]
            self._launched += 1
            # Ranks agree on which parameters have a gradient.
            held = [(parameter, parameter.grad) for parameter in bucket if parameter.grad is not None]
            if not held:
                continue
            own = [local(gradient) for _, gradient in held]
            flat, parts = _flattened(own, self._dtype)
            work, copies = start_sum(flat, self._group), list[tuple[Tensor, Tensor]]()
            for (parameter, gradient), mine, part in zip(held, own, parts, strict=True):
                if self._in_place or gradient.dtype != part.dtype:
                    copies += [] if part is mine else [(mine, part)]
                else:
                    # The sum becomes the gradient, and the memory of what this rank had is free.
                    parameter.grad = spread_like(part, gradient)
            self._sums.append(_Sum(work, flat, copies))
            if self._in_place:
                self._settle(_IN_FLIGHT - 1)

    def _settle(self, most: int = 0) -> None:
        """Make the device wait for all but so many of the sums that were launched, and copy them to the gradients that have another dtype or
        place."""
        while len(self._sums) > most:
            work, _, copies = self._sums.pop(0)
            work.wait()
            if copies:
                copy_(*map(list, zip(*copies, strict=True)))


def _flattened(gradients: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return gradients as one tensor to send, and the part of it that is each gradient. One gradient alone is not copied."""
    if len(gradients) == 1 and gradients[0].dtype == dtype and gradients[0].is_contiguous():
        return gradients[0], gradients
    pieces, firsts, end = list[Tensor](), list[int](), 0
    for gradient in gradients:
        firsts.append(end)
        pieces.append(gradient.reshape(-1).to(dtype))
        if padding := -gradient.numel() % (_ALIGNMENT // dtype.itemsize):
            pieces.append(gradient.new_zeros(padding, dtype=dtype))
        end += gradient.numel() + padding
    flat = torch.cat(pieces)
    return flat, [
        flat[first : first + gradient.numel()].view(gradient.shape)
        for first, gradient in zip(firsts, gradients, strict=True)
    ]


def start_sum(flat: Tensor, group: dist.ProcessGroup) -> Any:
    """Launch the all-reduce of a bucket in place, and return its handle."""
    return dist.all_reduce(flat, group=group, async_op=True)


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


def _buckets(parameters: Iterable[nn.Parameter], most: int) -> Iterator[list[nn.Parameter]]:
    """Yield consecutive parameters with at most `most` elements on this rank together, or one larger parameter."""
    bucket: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        size = local(parameter).numel()
        if bucket and held + size > most:
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += size
    if bucket:
        yield bucket

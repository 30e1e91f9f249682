"""Messages between pipeline stages.

Both sides know the shapes (`stream_forms.py`), so that a receive can be posted before its sender has begun. No buffer is kept: each is
allocated when its receive is posted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.compat.absent_peers import has_peers


class Form(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class Pending(NamedTuple):
    """A pending message. Its tensors must not be touched before `wait`."""

    tensors: tuple[Tensor, ...]
    works: list[Any]

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.tensors


class Mail:
    """Point-to-point messages between the ranks of one pipeline."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._rehearsed = group, device, not has_peers()

    def send(self, tensors: Sequence[Tensor], to: int) -> Pending:
        sent = tuple(tensor.detach().contiguous() for tensor in tensors)
        return Pending(sent, [dist.isend(tensor, group=self._group, group_dst=to) for tensor in sent])

    def receive(self, forms: Sequence[Form], source: int) -> Pending:
        buffers = tuple(torch.empty(form.shape, dtype=form.dtype, device=self._device) for form in forms)
        if self._rehearsed:
            # No message arrives, and the memory may hold anything, even numbers that make the rest of the step NaN.
            buffers = tuple(buffer.normal_() for buffer in buffers)
        return Pending(buffers, [dist.irecv(buffer, group=self._group, group_src=source) for buffer in buffers])

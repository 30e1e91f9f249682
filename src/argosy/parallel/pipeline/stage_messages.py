"""Messages between pipeline stages.

A stage sends the shapes of its outputs once for each shape of micro-batch, over the host network. Both sides then know the shapes,
and a receive can be posted before its sender has begun. No buffer is kept: each is allocated when its receive is posted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Integers in a header: the number of tensors, then the dtype, number of dimensions and sizes of each.
_HEADER = 16


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
        self._group, self._device = group, device

    def tell_forms(self, tensors: Sequence[Tensor], to: int) -> None:
        numbers = [len(tensors)]
        for tensor in tensors:
            numbers += [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[: len(numbers)] = torch.tensor(numbers)
        dist.send(header, group=self._group, group_dst=to)

    def hear_forms(self, source: int) -> list[Form]:
        header = torch.zeros(_HEADER, dtype=torch.int64)
        dist.recv(header, group=self._group, group_src=source)
        count, *numbers = header.tolist()
        forms = []
        for _ in range(count):
            dtype, ndim, *rest = numbers
            forms.append(Form(tuple(rest[:ndim]), _DTYPES[dtype]))
            numbers = rest[ndim:]
        return forms

    def send(self, tensors: Sequence[Tensor], to: int) -> Pending:
        sent = tuple(tensor.detach().contiguous() for tensor in tensors)
        return Pending(sent, [dist.isend(tensor, group=self._group, group_dst=to) for tensor in sent])

    def receive(self, forms: Sequence[Form], source: int) -> Pending:
        buffers = tuple(torch.empty(form.shape, dtype=form.dtype, device=self._device) for form in forms)
        return Pending(buffers, [dist.irecv(buffer, group=self._group, group_src=source) for buffer in buffers])

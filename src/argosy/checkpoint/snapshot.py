"""A copy of what a rank is to write, taken while training waits, so that the files can be written while it goes on.

A file's tensors lie in its buffer as they will in the file. Buffers are kept from save to save, and page-locked where they are
filled from a GPU, which then copies at the speed of the bus. Memory is slow when it is touched for the first time, which is done
ahead of the first save, beside training.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from argosy.checkpoint.save import Content


class Snapshot:
    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._preparing: threading.Thread | None = None

    def prepare(self, files: Mapping[str, Content]) -> None:
        """Get the memory that copies of these will need, beside whatever comes next."""
        buffers = [self._buffer(name, content) for name, content in files.items()]
        self._preparing = threading.Thread(target=lambda: [buffer.zero_() for buffer in buffers], daemon=True)
        self._preparing.start()

    def take(self, files: Mapping[str, Content]) -> dict[str, Content]:
        """Copies; when this returns, the originals may change. The copies of the time before are overwritten."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        copies = {name: self._copied(name, content) for name, content in files.items()}
        if any(tensor.is_cuda for content in files.values() for tensor in content.tensors):
            torch.cuda.current_stream().synchronize()
        return copies

    def _copied(self, name: str, content: Content) -> Content:
        buffer, at = self._buffer(name, content), 0
        for tensor in content.tensors:
            place = buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=True)
            at += tensor.nbytes
        return Content(content.header, [buffer])

    def _buffer(self, name: str, content: Content) -> Tensor:
        size = sum(tensor.nbytes for tensor in content.tensors)
        if name not in self._buffers or len(self._buffers[name]) != size:
            pinned = any(tensor.is_cuda for tensor in content.tensors)
            self._buffers[name] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[name]

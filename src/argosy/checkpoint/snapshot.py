"""A host copy of a rank's checkpoint files, so that training goes on while they are written.

A file's tensors lie in its buffer as they will in the file. Buffers are reused from save to save, and pinned if the tensors
are on a GPU, for the full speed of the bus. The first touch of memory is slow, so it happens in a thread before the first
save.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from argosy.checkpoint.save import Content


class Snapshot:
    """Buffers for copies of a rank's files, kept between saves."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._preparing: threading.Thread | None = None

    def prepare(self, files: Mapping[str, Content]) -> None:
        """Allocate and touch the buffers for these files in a background thread."""
        buffers = [self._buffer(name, content) for name, content in files.items()]
        self._preparing = threading.Thread(target=lambda: [buffer.zero_() for buffer in buffers], daemon=True)
        self._preparing.start()

    def take(self, files: Mapping[str, Content]) -> dict[str, Content]:
        """Copy the files. When this returns, the originals may change. The previous copies are overwritten."""
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

"""Host memory for a copy of a checkpoint file, prepared piece by piece in a thread beside training.

The first write to a page of memory is slow, and so is pinning it, without which a GPU's copies are slower too. CUDA's allocation of pinned memory does
both before it returns, and torch takes the next power of two of the size: where 33 GB were to be pinned, the first step waited for half a
minute. While memory is pinned, the driver makes other threads and processes wait that call it. So a piece is small, its pages are written
before, and the thread rests after each.
"""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from argosy.parallel.capture_turn import CAPTURE_TURN

_PIECE = 64 * 2**20  # bytes, a multiple of every page size
_PAGE = 4096
# Huge pages make the first writes and pinning faster. The memory stays out of forked processes: if one shared it, a write would give this
# process a new page (copy-on-write), and the GPU would go on writing to the old one.
_ADVICE = ("MADV_HUGEPAGE", "MADV_DONTFORK")


class HostBuffer:
    """Memory of `size` bytes for a copy of tensors, one after the other. Pinned, if a GPU is named, once it is prepared."""

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self.size = size
        self._device = device
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for name in _ADVICE:
            _advise(memory, name)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)[:size]
        self._pieces = list(self.bytes.split(_PIECE)) if size else []
        self._prepared, self._written = 0, False
        self._pinned: list[int] = []
        # `memory` is an argument so that it is still mapped when it is unpinned. At the end of the process, CUDA unpins it.
        weakref.finalize(self, _unpin_all, self._pinned, memory).atexit = False

    def prepare(self, stop: threading.Event) -> None:
        """Write and pin the pieces that are not yet prepared, until `stop` is set."""
        pins = self._device is not None
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while self._prepared < len(self._pieces) and not stop.is_set():
            piece = self._pieces[self._prepared]
            if not self._written:
                # numpy writes without the GIL.
                piece.numpy()[::_PAGE] = 0
            self._prepared += 1
            if pins:
                started = time.perf_counter()
                pins = self._pin(piece)
                stop.wait(time.perf_counter() - started)

    def fill(self, tensors: list[Tensor]) -> None:
        """Copy the tensors' bytes into the buffer; from a GPU, on the current stream, which the caller waits for.

        Pieces that are not prepared are copied to all the same, more slowly. No thread may prepare them meanwhile.
        """
        at = 0
        for tensor in tensors:
            at = self._copy(tensor, at)
        self._written = True

    def _copy(self, tensor: Tensor, at: int) -> int:
        """Copy a tensor to a place, and return where it ends. No copy is to two pieces, of which one may be pinned and the other not."""
        left = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        while len(left):
            part = left[: _PIECE - at % _PIECE]
            self.bytes[at : at + len(part)].copy_(part, non_blocking=True)
            left, at = left[len(part) :], at + len(part)
        return at

    def _pin(self, piece: Tensor) -> bool:
        """Pin a piece. Return False if the system pins no more: copies to it are slower, and as correct."""
        with CAPTURE_TURN:
            pinned = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 0)) == 0
        if pinned:
            self._pinned.append(piece.data_ptr())
        return pinned


def _advise(memory: mmap.mmap, name: str) -> None:
    advice = getattr(mmap, name, None)
    if advice is not None:
        # A kernel may be without it.
        with suppress(OSError):
            memory.madvise(advice)


def _unpin_all(pinned: list[int], memory: mmap.mmap) -> None:
    for address in pinned:
        torch.cuda.cudart().cudaHostUnregister(address)

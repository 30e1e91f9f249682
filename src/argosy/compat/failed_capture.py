"""What torch leaves undone after a capture of a CUDA graph that failed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch


def end_failed_capture(pool: Any) -> None:
    """End the allocation to a graph's pool that a failed capture began, if torch did not.

    If the driver refuses to end a capture, `torch.cuda.graph` raises before that: torch would take the device to be captured for the rest of
    the process, and free no cached memory for an allocation that does not fit.
    """
    with suppress(RuntimeError):
        device = torch.cuda.current_device()
        # Raises if the allocation has ended. Only otherwise the pool is still held by the capture.
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)

"""The memory that a piece of code takes at its peak, measured in this process: a fresh one would import torch and more first."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

# mallopt's number for the size from which memory is mapped, and the largest size glibc allows.
_M_MMAP_THRESHOLD, _LARGEST = -3, 32 * 2**20
_RESET_PEAK = "5"  # what /proc/PID/clear_refs takes for: the peak begins anew at what is resident now


def peak_growth(work: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory of this process grew at most while `work` ran."""
    gc.collect()
    libc = ctypes.CDLL(None)
    # A freed tensor goes back to the system at once. By default glibc keeps some of them, which ones differs from run to run.
    libc.mallopt(_M_MMAP_THRESHOLD, 2**17)
    try:
        # Memory that was freed and is still resident would be taken first, unseen.
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        before = _peak()
        work()
        return _peak() - before
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

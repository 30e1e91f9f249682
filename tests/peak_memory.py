"""The memory that a piece of code takes at its peak, measured in this process: a fresh one would import torch and more first."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_RESET_PEAK = "5"  # what /proc/PID/clear_refs takes for: the peak begins anew at what is resident now


def peak_growth(work: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory of this process grew at most while `work` ran."""
    gc.collect()
    # Memory that was freed and is still resident would be taken first, unseen.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _peak()
    work()
    return _peak() - before


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

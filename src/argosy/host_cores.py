"""Cores of the host that this process may use: the smaller of its CPU affinity and the quota of the container's cgroup."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Return the number of cores, at least 1. A pod with a limit of 2 cores on a node of 96 has 2; a quota is rounded up."""
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(mask, _quota(mask)))


def _quota(unlimited: int) -> int:
    try:
        quota, period = _CPU_MAX.read_text(encoding="ascii").split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        # There is no cgroup v2, or its quota is the word "max".
        return unlimited

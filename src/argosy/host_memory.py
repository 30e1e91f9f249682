"""Free host memory: the smaller of MemAvailable of the machine and what is left of the container's cgroup limit."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> float:
    """Return the bytes that can be allocated without swapping and within the cgroup limit; infinity where neither is known."""
    return min(_free_on_machine(), _free_in_cgroup())


def _free_on_machine() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024
    except (OSError, StopIteration):
        return float("inf")


def _free_in_cgroup() -> float:
    """Return the cgroup limit minus the memory in use. memory.current includes reclaimable page cache, so that is added back."""
    try:
        limit, used = (float((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        facts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return max(0.0, limit - used + float(facts["inactive_file"]))
    except (OSError, ValueError, KeyError):
        # There is no cgroup v2, or its limit is the word "max".
        return float("inf")

"""How much memory this host can still give: less than it has, and in a container less than the machine would."""

from __future__ import annotations

from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup")


def available_memory() -> float:
    """Bytes that can be taken without swapping, or beyond what this container may; without limit where nobody says."""
    return min(_left_on_machine(), _left_in_container())


def _left_on_machine() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024
    except (OSError, StopIteration):
        return float("inf")


def _left_in_container() -> float:
    """Files that were read and could be forgotten count as used there, and are not."""
    try:
        limit, used = (float((_CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        facts = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
        return max(0.0, limit - used + float(facts["inactive_file"]))
    except (OSError, ValueError, KeyError):  # no container, or one whose limit is the word "max"
        return float("inf")

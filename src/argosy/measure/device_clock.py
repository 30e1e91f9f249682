"""Timestamps of a device. On a GPU they are CUDA events, so that what is timed is not synchronised."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class DeviceClock:
    """Named moments on a device's own timeline."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        """Record the moment at which the work that was launched so far ends and `name` begins."""
        if self._on_gpu:
            moment: Any = torch.cuda.Event(enable_timing=True)
            moment.record()
        else:
            moment = time.perf_counter()
        self._marks.append((name, moment))

    def intervals_ms(self) -> list[tuple[str, float]]:
        """Return each name but the last with the milliseconds until the next mark. Waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [(name, self._between_ms(begin, end)) for (name, begin), (_, end) in pairwise(self._marks)]

    def _between_ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) if self._on_gpu else (end - begin) * 1000

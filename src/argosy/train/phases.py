"""Where the time of a step goes: marks between its parts, read when a step is logged.

On a GPU a mark is an event in the device's queue, so that nothing waits until the times are asked for; on a CPU it is the
clock. Only the newest steps before a log are kept, which bounds what a mark costs however rare logs are.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from typing import Any

import torch

COMMUNICATION, OTHER = "communication", "other"  # not the rank's own work; what lies between two steps
_KEPT = 16  # steps before a log whose parts are averaged


class Phases:
    """`enter` names what begins, `end_step` ends a step; `take` gives the mean seconds of each part since it was last asked."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._step: list[tuple[str, Any]] = []
        self._steps: deque[list[tuple[str, Any]]] = deque(maxlen=_KEPT)
        self._spare: list[Any] = []  # events that can be recorded again

    def enter(self, name: str) -> None:
        self._step.append((name, self._mark()))

    def end_step(self) -> None:
        if self._step:
            self.enter(OTHER)
            if len(self._steps) == _KEPT:
                self._spare += [mark for _, mark in self._steps.popleft()]
            self._steps.append(self._step)
            self._step = []

    def take(self) -> dict[str, float]:
        """Mean seconds of each part. Waits for the device."""
        seconds: dict[str, float] = {}
        for step in self._steps:
            for (name, before), (_, after) in pairwise(step):
                seconds[name] = seconds.get(name, 0.0) + self._between(before, after)
            self._spare += [mark for _, mark in step]
        count = max(1, len(self._steps))
        self._steps.clear()
        return {name: total / count for name, total in seconds.items()}

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        mark = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def _between(self, before: Any, after: Any) -> float:
        if not self._on_gpu:
            return float(after - before)
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000

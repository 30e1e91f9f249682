"""The time of a device: its timestamps, and the seconds in which it computes. On a GPU timestamps are CUDA events, so that what is timed is
not synchronised."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from argosy.train.exposed_communication import union


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


class DeviceTime:
    """The seconds in which a device computes, by phase of a step. Each phase is profiled by itself, and waits for the one before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: tuple[str, profile] | None = None
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """End the current phase, and begin the phase `name`."""
        self.end()
        activity = ProfilerActivity.CUDA if self._device.type == "cuda" else ProfilerActivity.CPU
        self._running = name, profile(activities=[activity], acc_events=True)
        self._running[1].start()

    def end(self) -> None:
        if self._running is None:
            return
        (name, running), self._running = self._running, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        running.stop()
        kind = self._device.type.upper()
        ran = [e.time_range for e in running.events() or [] if e.device_type.name == kind and not e.is_user_annotation]
        busy_us = sum(end - start for start, end in union((one.start, one.end) for one in ran))
        self.seconds[name] = self.seconds.get(name, 0.0) + busy_us / 1e6

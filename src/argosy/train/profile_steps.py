"""`argosy train --profile 10:13`: runs these steps of a real run under torch's profiler.

Each rank writes a trace for Perfetto, and on a GPU the allocator's history. The first rank prints a short table of kernel times
and, in a layout of several ranks, its exposed communication by axis.
The profiler slows down the steps in the window; steps before and after it are not affected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from argosy.compat import memory_history, record_memory_history
from argosy.errors import ArgosyError
from argosy.parallel.mesh import Mesh
from argosy.train.exposed_communication import exposure_of
from argosy.train.kernel_profile import STEP, kind_of, write_trace

_COMMUNICATION = re.compile(r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)


@dataclass(frozen=True)
class Window:
    """The steps to profile: from `first` up to, not including, `last`."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str, steps: int | None = None) -> Window:
        """Parse `10:13` or `10`. `steps` is the length of the run, if it is known."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        window = None if match is None else cls(int(match[1]), int(match[2] or int(match[1]) + 1))
        if window is None or not 1 <= window.first < window.last:
            raise ArgosyError(
                "config.bad-value",
                f"{text!r} does not name steps",
                key="--profile",
                value=text,
                fix="write 10:13 for steps 10, 11 and 12, or 10 for one; steps count from 1",
            )
        if steps is not None and window.first > steps:
            raise ArgosyError(
                "config.bad-value",
                f"the run has {steps} steps, and step {window.first} is not among them",
                key="--profile",
                value=text,
                fix=f"name steps up to {steps}, as {max(1, steps - 3)}:{steps}",
            )
        return window

    def passed(self, done: int) -> list[str]:
        """Return a message if a run that resumes after step `done` is past the window."""
        behind = self.last - 1 <= done
        return [f"steps {self.first} to {self.last - 1} are done already: nothing is profiled"] if behind else []


class Profiling:
    """The profiler of a run. Call `before` and `after` around each step; the profile is written when the window or the run ends."""

    def __init__(self, window: Window | None, root: Path, mesh: Mesh) -> None:
        self._window, self._root, self._mesh, self._device = window, root / "profile", mesh, mesh.device
        self._profiler: Any = None
        self._step = record_function(STEP)
        self._begun = 0

    def before(self, step: int) -> None:
        if self._window is not None and self._profiler is None and self._window.first <= step < self._window.last:
            self._begun = step
            self._begin()
        if self._profiler is not None:
            self._step = record_function(STEP)
            self._step.__enter__()

    def after(self, step: int, *, last: bool) -> list[str]:
        """Return the table if the window or the run has just ended; otherwise no lines."""
        if self._profiler is None or self._window is None:
            return []
        self._step.__exit__(None, None, None)
        return self._end(step + 1 - self._begun) if last or step + 1 >= self._window.last else []

    def _begin(self) -> None:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            record_memory_history(True)
        self._profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
        self._profiler.__enter__()

    def _end(self, steps: int) -> list[str]:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
        profiler, self._profiler, self._window = self._profiler, None, None
        profiler.__exit__(None, None, None)
        trace = self._root / f"trace-rank{self._mesh.rank}.json"
        try:
            self._root.mkdir(exist_ok=True)
            write_trace(profiler, trace)
            if on_gpu:
                (self._root / f"memory-rank{self._mesh.rank}.json").write_bytes(memory_history(self._device))
                record_memory_history(False)
        except OSError as error:
            return [f"the profile could not be written: {error}"]
        if not self._mesh.is_first:
            return []
        return _table(profiler, on_gpu, steps, trace) + self._exposure(trace)

    def _exposure(self, trace: Path) -> list[str]:
        """Return the lines about exposed communication. A trace that cannot be read ends no run."""
        try:
            exposure = exposure_of(trace, self._mesh.names) if self._mesh.names else None
        except (OSError, ValueError, KeyError) as error:
            return [f"exposed communication is not known, because the trace cannot be read: {error!r}"]
        return [] if exposure is None else exposure.lines()


def _table(profiler: Any, on_gpu: bool, steps: int, trace: Path) -> list[str]:
    """Return a table of milliseconds per step by kind, and the longest kernels."""
    where, times = "CUDA" if on_gpu else "CPU", dict[str, tuple[float, int]]()
    for event in profiler.events() or []:
        if event.device_type.name == where and not event.is_user_annotation and event.name != STEP:
            spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            time, calls = times.get(event.name, (0.0, 0))
            times[event.name] = (time + spent / 1000 / steps, calls + 1)
    kinds: dict[str, float] = {}
    for name, (time, _) in times.items():
        kind = "communication" if _COMMUNICATION.search(name) else kind_of(name)
        kinds[kind] = kinds.get(kind, 0.0) + time
    total = sum(kinds.values()) or 1.0
    lines = [f"profile of {steps} steps in {trace}; ms a step on the {'GPU' if on_gpu else 'CPU'}:"]
    for kind, time in sorted(kinds.items(), key=lambda item: -item[1]):
        lines.append(f"  {kind:<14}{time:10.2f} {time / total:6.1%}")
    longest = sorted(times.items(), key=lambda item: -item[1][0])[:8]
    return lines + [f"  {name[:60]:<60}{time:10.2f}  {calls // steps or 1} calls" for name, (time, calls) in longest]

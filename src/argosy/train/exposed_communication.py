"""Exposed communication, computed from a trace of torch's profiler.

Communication is exposed while it runs and nothing computes: the time of NCCL kernels outside of any other kernel of the same
rank. A kernel that waits for another rank counts too, so the bubble of a pipeline is exposed communication of `pp`. The planner
predicts the same share of a step, with the bubble apart.

The axis of a collective is the description of its process group, which torch's device mesh sets to `mesh_<axis>`. A group of all
ranks may be torch's default group, and gloo records no group: both stand for all axes of the layout. On a CPU there are no
kernels: gloo's own ranges are the communication, and the operations of the thread that takes the steps are the computation.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson

from argosy.parallel.trace_ranges import LEFT_OVER, PASSES
from argosy.train.kernel_profile import HOST_WAITS, STEP

_NCCL = re.compile(r"^nccl(Dev)?Kernel", re.IGNORECASE)
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_GROUP = "Process Group Description"

# (start, end) in microseconds.
Interval = tuple[float, float]
Event = dict[str, Any]


@dataclass(frozen=True)
class AxisTime:
    """Milliseconds a step of the communication along one axis."""

    busy: float
    exposed: float
    # Collectives and messages a step.
    calls: float


@dataclass(frozen=True)
class Exposure:
    """The communication of a profiled step, by axis."""

    step_ms: float
    axes: dict[str, AxisTime]
    # Milliseconds a step in which any axis is exposed. At most the sum over axes, which may overlap each other.
    exposed_ms: float
    # Collectives launched inside of a pass, and those that were launched after the pass they belong to.
    in_pass: int
    late: int
    # How often the host waited for the device inside of a pass.
    host_waits: int

    @property
    def share(self) -> float:
        return self.exposed_ms / self.step_ms

    def lines(self) -> list[str]:
        """Return a table for people; no lines where nothing was communicated."""
        if not self.axes:
            return []
        found = [f"exposed communication: {self.share:.1%} of a step of {self.step_ms:.2f} ms; by axis, ms a step:"]
        for axis, time in sorted(self.axes.items(), key=lambda item: -item[1].exposed):
            found.append(
                f"  {axis:<24}{time.exposed:10.2f} exposed {time.exposed / self.step_ms:6.1%}, of {time.busy:.2f} in "
                f"{time.calls:.0f} collectives"
            )
        if launched := self.in_pass + self.late:
            found.append(
                f"  {self.in_pass} of {launched} collectives ({self.in_pass / launched:.0%}) launched before the pass they belong "
                f"to ended; the host waited {self.host_waits} times inside of passes"
            )
        return found


def exposure_of(trace: Path, axes: Sequence[str]) -> Exposure | None:
    """Read a trace that `--profile` wrote. Returns None if it has no step. `axes` are those of the layout."""
    return measure_exposure(orjson.loads(trace.read_bytes())["traceEvents"], axes)


def measure_exposure(events: Iterable[Event], axes: Sequence[str]) -> Exposure | None:
    """Return the exposed communication of the steps in a trace; None if it has no step."""
    events = [event for event in events if event.get("ph") == "X" and "cat" in event]
    steps = [event for event in events if event["name"] == STEP and event["cat"] == "user_annotation"]
    if not steps:
        return None
    kernels = [event for event in events if event["cat"] == "kernel"]
    collectives, compute = _on_gpu(events, kernels) if kernels else _on_cpu(events, steps[0]["tid"])
    first = min(event["ts"] for event in steps)
    last = max(event["ts"] + event["dur"] for event in (*steps, *kernels))
    working = union(compute)
    by_axis: dict[str, list[_Collective]] = {}
    for one in collectives:
        by_axis.setdefault(_axis(one.group, axes), []).append(one)
    found = {}
    for axis, some in by_axis.items():
        busy = union([one.ran for one in some])
        found[axis] = AxisTime(
            _ms(busy) / len(steps), _ms(difference(busy, working)) / len(steps), len(some) / len(steps)
        )
    everywhere = difference(union([one.ran for one in collectives]), working)
    passes = _ranges(events, PASSES)
    inside = [_is_inside(one.launched, passes) for one in collectives]
    late = [_is_inside(one.launched, _ranges(events, (LEFT_OVER,))) for one in collectives]
    waits = [event for event in events if event["name"] in HOST_WAITS and _is_inside(event["ts"], passes)]
    return Exposure(
        step_ms=(last - first) / 1000 / len(steps),
        axes=found,
        exposed_ms=_ms(everywhere) / len(steps),
        in_pass=sum(inside),
        late=sum(late),
        host_waits=len(waits),
    )


@dataclass(frozen=True)
class _Collective:
    ran: Interval
    # When the host launched it, in microseconds.
    launched: float
    # The description of the process group, if it is known.
    group: str


def _on_gpu(events: list[Event], kernels: list[Event]) -> tuple[list[_Collective], list[Interval]]:
    """Return NCCL's kernels, and the intervals of all others."""
    launches: dict[Any, float] = {
        event["args"].get("correlation"): event["ts"] for event in events if event["cat"] in _LAUNCHES
    }
    # torch records the group of a collective in a range around its launch, and mostly in the kernel too.
    recorded = sorted(
        (event for event in events if event["name"] == "record_param_comms"), key=lambda event: event["ts"]
    )
    begins = [event["ts"] for event in recorded]
    collectives, compute = [], []
    for kernel in kernels:
        if not _NCCL.match(kernel["name"]):
            compute.append(_interval(kernel))
            continue
        number = kernel["args"].get("correlation")
        launched: float = launches[number] if number in launches else kernel["ts"]
        group = kernel["args"].get(_GROUP)
        if group is None and (before := bisect_right(begins, launched)):
            group = recorded[before - 1]["args"].get(_GROUP)
        collectives.append(_Collective(_interval(kernel), launched, group or ""))
    return collectives, compute


def _on_cpu(events: list[Event], thread: int) -> tuple[list[_Collective], list[Interval]]:
    """Return gloo's ranges, and the intervals of the thread's operations that are no communication."""
    operations = [event for event in events if event["cat"] == "cpu_op" and event["tid"] == thread]
    launches = [event for event in operations if event["name"].startswith("c10d::")]
    calls = union([_interval(event) for event in launches])
    compute = difference(union([_interval(event) for event in operations]), calls)
    ran = sorted(_interval(event) for event in events if event["name"].startswith("gloo:"))
    begins = sorted(event["ts"] for event in launches)
    # gloo's threads take collectives in the order of their launches, and may begin later. The last may not have begun.
    launched = begins if len(begins) >= len(ran) else [start for start, _ in ran]
    return [_Collective(one, start, "") for one, start in zip(ran, launched, strict=False)], compute


def _axis(group: str, axes: Sequence[str]) -> str:
    return group.removeprefix("mesh_") if group.startswith("mesh_") else " x ".join(axes)


def _ranges(events: Iterable[Event], names: Sequence[str]) -> list[Interval]:
    return union([_interval(event) for event in events if event["name"] in names and event["cat"] == "user_annotation"])


def _is_inside(time: float, intervals: Sequence[Interval]) -> bool:
    """True if a time is in one of the intervals, which are sorted and disjoint."""
    before = bisect_right(intervals, (time, float("inf")))
    return before > 0 and time <= intervals[before - 1][1]


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _ms(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals) / 1000


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as sorted, disjoint intervals."""
    ordered = sorted(intervals)
    found: list[Interval] = []
    for (start, end), reached in zip(ordered, accumulate((end for _, end in ordered), max), strict=True):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], reached
        else:
            found.append((start, end))
    return found


def difference(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the parts of `intervals` outside of `others`. Both are sorted and disjoint."""
    found: list[Interval] = []
    at = 0
    for start, end in intervals:
        while at < len(others) and others[at][1] <= start:
            at += 1
        reached, following = start, at
        while following < len(others) and others[following][0] < end:
            if others[following][0] > reached:
                found.append((reached, others[following][0]))
            reached = max(reached, others[following][1])
            following += 1
        if reached < end:
            found.append((reached, end))
    return found

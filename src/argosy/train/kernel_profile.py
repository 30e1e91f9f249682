"""A profile of one training step: the device time of every kernel, by kind, and the number of host waits.

The name of a kernel gives its kind. Matmuls and attention are the floor: work that the model needs and that no fusion removes. On
a CPU the operations themselves are timed.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# In this order: names of attention kernels may match those of matmuls too.
_KINDS = {
    "attention": re.compile(r"cudnn|sdpa|fmha|flash|attention|scaled_dot_product", re.IGNORECASE),
    "gemm": re.compile(
        r"gemm|nvjet|cutlass|xmma|cublas|splitk|aten::(addmm|mm|bmm|baddbmm|_scaled_mm|_grouped_mm)$", re.IGNORECASE
    ),
}
FLOOR = tuple(_KINDS)
# Calls by which the host waits for the device.
HOST_WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
STEP = "argosy step"


@dataclass(frozen=True)
class StepProfile:
    """The kernel times of a step, in milliseconds."""

    # Keys: "gemm", "attention", "other".
    kinds: dict[str, float]
    # (name, time, calls), longest first.
    kernels: list[tuple[str, float, int]]
    # How often the host waited for the device inside the step.
    host_waits: int

    @property
    def floor(self) -> float:
        return sum(self.kinds[kind] for kind in FLOOR)

    @property
    def total(self) -> float:
        return sum(self.kinds.values())


def profile_step(step: Callable[[], object], device: torch.device, trace: Path | None = None) -> StepProfile:
    """Run one step under the profiler. A trace for chrome://tracing or Perfetto is written to `trace`."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        with record_function(STEP):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    if trace is not None:
        write_trace(found, trace)
    events = found.events() or []
    where = "CUDA" if on_gpu else "CPU"
    times: dict[str, tuple[float, int]] = {}
    for event in events:
        if event.device_type.name != where or event.name == STEP or event.is_user_annotation:
            continue
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total  # microseconds
        time, calls = times.get(event.name, (0.0, 0))
        times[event.name] = (time + spent / 1000, calls + 1)
    kinds = dict.fromkeys((*FLOOR, "other"), 0.0)
    for name, (time, _) in times.items():
        kinds[kind_of(name)] += time
    kernels = sorted(((name, time, calls) for name, (time, calls) in times.items()), key=lambda k: -k[1])
    span = next(e.time_range for e in events if e.name == STEP and e.device_type.name == "CPU")
    waits = [e for e in events if e.name in HOST_WAITS and span.start <= e.time_range.start <= span.end]
    return StepProfile(kinds, kernels, len(waits))


def write_trace(found: profile, path: Path) -> None:
    """Write a trace. Raise OSError if it is incomplete: the profiler itself does not raise when it cannot write."""
    path.write_bytes(b"")
    found.export_chrome_trace(str(path))
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(errno.EIO, "the trace could not be written to its end", str(path))


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(kernel)), "other")

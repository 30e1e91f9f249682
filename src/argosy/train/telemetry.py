"""Telemetry of a training run, recorded when a step is logged: rates and utilisation, time by phase, memory by category, times of
each rank, sensors of GPUs and hosts, goodput, cost, and alerts.

Between logs it only reads clocks. At a log the ranks exchange a few numbers over the host network, and the first rank writes them.

`Phases` measures the time of each phase of a step, with timestamps that are read when a step is logged. On a GPU a timestamp is a
CUDA event, so that nothing waits until the times are read; on a CPU it is the clock. Only the newest steps before a log are kept,
which bounds the cost of timestamps however rare logs are.

`Meter` computes the metrics of a logged step: loss, rates, utilisation, data wait, memory and the remaining time.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch

from argosy.config.schema import RunSpec
from argosy.model.moe import describe_load
from argosy.parallel.mesh import Mesh
from argosy.plan.hardware import Peak, facts
from argosy.record.alerts import Alerts
from argosy.record.jsonl import JsonlWriter, Record, now
from argosy.record.ledger import PRODUCTIVE, Ledger, process_started
from argosy.record.rank_columns import SENSED, Ranks, line_interval_s
from argosy.record.rundir import RunDir
from argosy.record.sensors import Sensors
from argosy.train.device import Memory, peak_memory_gib
from argosy.train.step import Step


@dataclass
class Taken:
    """The facts that the loop passes about the step it logs."""

    step: int
    done: Step
    lr: float
    # Time spent waiting for data since the last log.
    waited_s: float
    # Samples and tokens consumed by the run so far.
    samples: int
    tokens: int


class Telemetry:
    """The measurements of a run, which every rank takes and the first rank records when a step is logged."""

    def __init__(self, spec: RunSpec, run: RunDir, mesh: Mesh, meter: Meter, *, first: int, rewound: bool) -> None:
        self.meter, self.phases = meter, Phases(mesh.device)
        self._price, self._mesh, self._stages = hourly_price(spec), mesh, spec.parallel.pp
        # The ranks of a host share its processors and network: one of them reads those.
        self._sensors = Sensors(_uuid(mesh.device), host=mesh.local_rank == 0)
        self._alerts = Alerts(spec.log.alerts, run.root)
        self._ranks, self._line_due = JsonlWriter(run.ranks), float("-inf")
        started = now() if rewound else process_started()
        self._ledger = Ledger.resumed(run, first, started, held=rewound) if mesh.is_first else Ledger()
        self._ledger.spend("startup", now() - started)
        self._paused: dict[str, float] = {}
        self._logged = time.perf_counter()
        self._steps = 0
        # By category. None until the first step is done.
        self.memory: Memory | None = None

    def after_step(self, *, samples: int, tokens: int) -> None:
        self.phases.end_step()
        self.meter.count(samples=samples, tokens=tokens)
        self._steps += 1

    @contextmanager
    def pause(self, why: str) -> Iterator[None]:
        """Exclude the time of an evaluation or a save from the rates, and account for it separately."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.meter.pause(seconds)
        self._paused[why] = self._paused.get(why, 0.0) + seconds

    def record(self, taken: Taken) -> tuple[Record, list[dict[str, Any]]]:
        """Return the record of a step and the alerts it raises. Waits for the device and for the other ranks."""
        result, tokens = taken.done.result, int(taken.done.result.tokens)
        memory = peak_memory_gib(self._mesh.device)
        record = self.meter.record(
            step=taken.step,
            loss=float(result.loss_sum) / tokens,
            grad_norm=float(taken.done.grad_norm),
            lr=taken.lr,
            waited_s=taken.waited_s,
            memory_gib=memory,
            samples=taken.samples,
            tokens=taken.tokens,
        )
        record |= {name: float(sum_) / tokens for name, sum_ in result.metrics.items()}
        if result.expert_load is not None:
            record |= describe_load(result.expert_load)
        data_s = taken.waited_s / max(1, self._steps)
        parts = self.phases.take()
        own_s = sum(seconds for name, seconds in parts.items() if name != COMMUNICATION)
        record |= {f"time/{name}": seconds for name, seconds in ({"data": data_s} | parts).items()}
        record |= self._memory_parts(memory)
        ranks = self._exchange(taken.step, own_s + data_s, data_s, memory)
        record |= ranks.summary()
        record |= self._account(taken.waited_s)
        self._steps = 0
        if not self._mesh.is_first:
            return record, []
        if (self._mesh.world_size > 1 or "utilisation" in ranks.columns) and time.monotonic() >= self._line_due:
            self._ranks.write(ranks.line())
            self._line_due = time.monotonic() + line_interval_s(self._mesh.world_size)
        return record, self._alerts.observe(record, ranks)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._sensors.close()
        self._ranks.close()

    def _memory_parts(self, peak: float) -> Record:
        if self.memory is None:
            return {}
        kept = {
            "parameters": self.memory.parameters,
            "gradients": self.memory.gradients,
            "optimiser": self.memory.optimiser,
        }
        return {f"memory/{n}": v for n, v in (kept | {"rest": max(0.0, peak - sum(kept.values()))}).items()}

    def _exchange(self, step: int, own_s: float, data_s: float, memory: float) -> Ranks:
        sensed = self._sensors.read()
        mine = [own_s, data_s, memory, *(sensed.get(field, math.nan) for field in SENSED)]
        return Ranks.of(self._mesh.gathered(mine), step=step, time=now(), stages=self._stages)

    def _account(self, waited_s: float) -> Record:
        """Split the time since the last log by category, and return the totals so far."""
        passed = time.perf_counter() - self._logged
        self._logged += passed
        aside = sum(self._paused.values())
        for why, seconds in self._paused.items():
            self._ledger.spend(why, seconds)
        self._ledger.spend("data", waited_s)
        self._ledger.spend(PRODUCTIVE, passed - aside - waited_s)
        record = {f"{why}_s": seconds for why, seconds in self._paused.items()}
        self._paused = {}
        return record | self._ledger.report(self._price)


def hourly_price(spec: RunSpec) -> float | None:
    """Return the price in dollars per hour: `log.price`, or the known price of the cluster's nodes."""
    if spec.log.price is not None or spec.cluster is None or spec.cluster.instance is None:
        return spec.log.price
    instance = facts().instances.get(spec.cluster.instance.removeprefix("ml."))
    return None if instance is None or instance.price is None else instance.price * spec.cluster.nodes


def _uuid(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


# Phases: communication is not the rank's own work, and other is the time between two steps.
COMMUNICATION, OTHER = "communication", "other"
# The number of steps before a log whose phases are averaged.
_KEPT = 16


class Phases:
    """The times of the phases of a step. `enter` begins a phase, `end_step` ends a step, and `take` returns the mean times."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._step: list[tuple[str, Any]] = []
        self._steps: deque[list[tuple[str, Any]]] = deque(maxlen=_KEPT)
        # CUDA events that can be recorded again.
        self._spare: list[Any] = []

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
        """Return the mean seconds of each phase since the last call. Waits for the device."""
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


@dataclass
class Meter:
    """The rates and the ETA of a run.

    Rates cover the steps since the last log, without evaluations and saves. The ETA is based on all samples of this process except
    those of the first step, which includes warm-up, and on the time of evaluations and saves between them."""

    steps: int
    # Samples of the whole run.
    samples: int
    flops_per_token: float
    peak: Peak | None
    # `peak` is that of one device.
    devices: int = 1
    _since: float = field(default_factory=time.perf_counter)
    _tokens: int = 0
    _steps_done: int = 0
    _warm_at: float | None = None
    _samples_warm: int = 0

    def count(self, *, samples: int, tokens: int) -> None:
        """Count a step, after it."""
        self._tokens += tokens
        self._steps_done += 1
        if self._warm_at is None:
            self._warm_at = time.perf_counter()
        else:
            self._samples_warm += samples

    def pause(self, seconds: float) -> None:
        """Leave the time of an evaluation or a save out of the rates."""
        self._since += seconds

    def record(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        waited_s: float,
        memory_gib: float,
        samples: int,
        tokens: int,
    ) -> Record:
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        tokens_per_s = self._tokens / elapsed
        tflops = tokens_per_s * self.flops_per_token / 1e12
        step_s = elapsed / max(1, self._steps_done)
        if self._warm_at is not None and self._samples_warm:
            left_s = (time.perf_counter() - self._warm_at) / self._samples_warm * (self.samples - samples)
        else:
            left_s = step_s * (self.steps - step)
        self._since, self._tokens, self._steps_done = time.perf_counter(), 0, 0
        return {
            "step": step,
            "steps": self.steps,
            "time": now(),
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "samples": samples,
            "tokens": tokens,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_gpu": tokens_per_s / self.devices,
            "tflops": tflops,
            "mfu": None if self.peak is None else tflops / (self.peak.tflops * self.devices),
            "peak": None if self.peak is None else str(self.peak),
            "step_s": step_s,
            "data_wait": min(1.0, waited_s / elapsed),
            "memory_gib": memory_gib,
            "eta_s": left_s,
        }

"""What is measured while a run trains, and put on its record when a step is logged: rates and utilisation, where a step's time
and a device's memory go, what each rank did, what the GPU's sensors say, goodput, cost, and alerts.

Between logs it only reads clocks. Ranks exchange a few numbers at a log, between hosts; the first writes them down.

`Phases` tells where the time of a step goes: marks between its parts, read when a step is logged. On a GPU a mark is an event in the device's queue, so that nothing waits until the times are asked for; on a CPU it is the
clock. Only the newest steps before a log are kept, which bounds what a mark costs however rare logs are.

`Meter` makes the figures of a logged step: loss, rates, utilisation, waiting, memory and the time that is left.
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
from argosy.record.rank_columns import FIELDS, Ranks, Sensors
from argosy.record.rundir import RunDir
from argosy.train.device import Memory, peak_memory_gib
from argosy.train.step import Step


@dataclass
class Taken:
    """What the loop knows about the step it logs."""

    step: int
    done: Step
    lr: float
    waited_s: float  # for data, since the last log
    samples: int  # consumed by the run so far
    tokens: int


class Telemetry:
    def __init__(self, spec: RunSpec, run: RunDir, mesh: Mesh, meter: Meter, *, first: int, rewound: bool) -> None:
        self.meter, self.phases = meter, Phases(mesh.device)
        self._price, self._mesh, self._stages = hourly_price(spec), mesh, spec.parallel.pp
        self._sensors = Sensors(_uuid(mesh.device))
        self._alerts = Alerts(spec.log.alerts, run.root)
        self._ranks = JsonlWriter(run.ranks)
        started = now() if rewound else process_started()
        self._ledger = Ledger.resumed(run, first, started, held=rewound) if mesh.is_first else Ledger()
        self._ledger.spend("startup", now() - started)
        self._paused: dict[str, float] = {}
        self._logged = time.perf_counter()
        self._steps = 0
        self.memory: Memory | None = None  # by category, once a step was made

    def after_step(self, *, samples: int, tokens: int) -> None:
        self.phases.end_step()
        self.meter.count(samples=samples, tokens=tokens)
        self._steps += 1

    @contextmanager
    def pause(self, why: str) -> Iterator[None]:
        """Around an evaluation or a save: kept out of the rates, and accounted for."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.meter.pause(seconds)
        self._paused[why] = self._paused.get(why, 0.0) + seconds

    def record(self, taken: Taken) -> tuple[Record, list[dict[str, Any]]]:
        """The record of a step and the alerts it raises; waits for the device, and for the other ranks."""
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
        if self._mesh.world_size > 1 or "utilisation" in ranks.columns:
            self._ranks.write(ranks.line())
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
        mine = [own_s, data_s, memory, *(sensed.get(field, math.nan) for field in FIELDS)]
        return Ranks.of(self._mesh.gathered(mine), step=step, time=now(), stages=self._stages)

    def _account(self, waited_s: float) -> Record:
        """Split the time since the last log, and say where all of it went so far."""
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
    """Dollars an hour: as given, or what is known of the cluster's nodes."""
    if spec.log.price is not None or spec.cluster is None or spec.cluster.instance is None:
        return spec.log.price
    instance = facts().instances.get(spec.cluster.instance.removeprefix("ml."))
    return None if instance is None or instance.price is None else instance.price * spec.cluster.nodes


def _uuid(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


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


@dataclass
class Meter:
    """Rates are over the steps since the last log, without evaluations and saves; the ETA is over all samples of this process
    but those of the first step, which pays for warming up, and with everything that came between them."""

    steps: int
    samples: int  # of the whole run
    flops_per_token: float
    peak: Peak | None
    devices: int = 1  # the peak is of each
    _since: float = field(default_factory=time.perf_counter)
    _tokens: int = 0
    _steps_done: int = 0
    _warm_at: float | None = None
    _samples_warm: int = 0

    def count(self, *, samples: int, tokens: int) -> None:
        """After each step."""
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

"""What is measured while a run trains, and put on its record when a step is logged: rates and utilisation, where a step's time
and a device's memory go, what each rank did, what the GPU's sensors say, goodput, cost, and alerts.

Between logs it only reads clocks. Ranks exchange a few numbers at a log, between hosts; the first writes them down.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from argosy.config.schema import RunSpec
from argosy.model.moe import describe_load
from argosy.parallel.mesh import Mesh
from argosy.plan.hardware import facts
from argosy.record.alerts import Alerts
from argosy.record.jsonl import JsonlWriter, Record, now
from argosy.record.ledger import PRODUCTIVE, Ledger, process_started
from argosy.record.rank_columns import Ranks
from argosy.record.rundir import RunDir
from argosy.record.sensors import FIELDS, Sensors
from argosy.train.device import peak_memory_gib
from argosy.train.device_memory import Memory
from argosy.train.meter import Meter
from argosy.train.phases import COMMUNICATION, Phases
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

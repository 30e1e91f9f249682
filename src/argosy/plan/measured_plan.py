"""A plan whose compute and memory were measured on one GPU: what the planner predicts of a rank, and the step that follows.

`argosy bench --world-size` runs single ranks of a layout with collectives that move nothing. Their seconds replace the planner's
compute; communication, the pipeline bubble and the wait for stragglers stay predicted. Of a pipeline of which only some stages were
measured, the others keep the planner's time, scaled by how far the measured stages are from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from statistics import mean
from typing import Any

from argosy.config.schema import RunSpec
from argosy.plan.advise import STACK, layout_of, work_of
from argosy.plan.calibration import Calibration, Stack, calibration
from argosy.plan.hardware import Cluster
from argosy.plan.layouts import Layout, Work
from argosy.plan.memory import StageMemory, stage_memory
from argosy.plan.time import bubble_seconds, micro_batch_time, once_a_step


@dataclass(frozen=True)
class Seconds:
    """The compute of one rank: all forward and backward passes of a step, and what it does once a step."""

    passes: float
    update: float

    @property
    def total(self) -> float:
        return self.passes + self.update


@dataclass(frozen=True)
class MeasuredStep:
    """A step in seconds. `passes` and `update` were measured; the rest is predicted."""

    cluster: str
    passes: float
    communication: float
    bubble: float
    update: float
    # Overhead outside the layers, and the wait for the slowest node.
    rest: float

    @property
    def total(self) -> float:
        return self.passes + self.communication + self.bubble + self.update + self.rest

    def as_dict(self) -> dict[str, Any]:
        predicted = {"communication": self.communication, "bubble": self.bubble, "rest": self.rest}
        return {
            "cluster": self.cluster,
            "step_s": round(self.total, 6),
            "measured_s": {"passes": round(self.passes, 6), "update": round(self.update, 6)},
            "predicted_s": {name: round(seconds, 6) for name, seconds in predicted.items()},
        }


@dataclass(frozen=True)
class RankPlan:
    """The planner's view of a run with its own layout, rank by rank. A `stage` is the place of a rank in its pipeline."""

    work: Work
    layout: Layout
    stack: Stack
    known: Calibration

    @classmethod
    def of(cls, spec: RunSpec, precision: str, calibrated: str | None = None) -> RankPlan:
        """Return the plan of a run in the precision of the device that computes."""
        known = calibration(calibrated)
        return cls(work_of(spec, precision=precision), layout_of(spec.parallel), known.stacks[STACK], known)

    @property
    def micro_batches(self) -> int:
        return self.work.micro_batches(self.layout)

    def memory(self, stage: int) -> StageMemory:
        return stage_memory(self.work, self.layout, self.stack, self.known, stage)

    def compute(self, stage: int, cluster: Cluster) -> Seconds:
        """Return the predicted compute of a rank of a stage in a step."""
        micro = micro_batch_time(self.work, self.layout, cluster, self.stack, self.known)
        update = once_a_step(self.work, self.layout, cluster, self.stack, self.known, micro)[1]
        return Seconds(self.micro_batches * micro.compute(stage), update)

    def step(self, measured: Mapping[int, Seconds], cluster: Cluster) -> MeasuredStep:
        """Return the step that follows from the compute measured on one rank of some of the stages."""
        micro = micro_batch_time(self.work, self.layout, cluster, self.stack, self.known)
        m, stages = self.micro_batches, range(self.layout.pp)
        predicted = {stage: m * micro.compute(stage) for stage in stages}
        scale = mean(seconds.passes / predicted[stage] for stage, seconds in measured.items())
        passes = [measured[s].passes if s in measured else scale * predicted[s] for s in stages]
        busy = [passes[stage] / m + micro.communication(stage) for stage in stages]
        slowest = busy.index(max(busy))
        gradients, _ = once_a_step(self.work, self.layout, cluster, self.stack, self.known, micro)
        update = max(seconds.update for seconds in measured.values())
        communication = m * micro.communication(slowest) + gradients
        bubble, outside = bubble_seconds(self.layout, m, busy), self.known.constants["step"]
        spent = passes[slowest] + communication + bubble + update + outside
        waiting = spent * self.known.constants["straggle"] * log2(max(1, cluster.nodes))
        return MeasuredStep(cluster.name, passes[slowest], communication, bubble, update, outside + waiting)

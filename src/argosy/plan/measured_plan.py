"""A plan whose compute and memory were measured on one GPU: what the planner predicts of a rank, and the step that follows.

`argosy bench --world-size` runs single ranks of a layout with collectives that move nothing. Their seconds replace the planner's
compute; communication, the pipeline bubble and the wait for stragglers stay predicted. Of a pipeline of which only some stages were
measured, the others keep the planner's time, scaled by how far the measured stages are from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from pathlib import Path
from statistics import mean
from typing import Any

import orjson

from argosy.config.counts import count_parameters
from argosy.config.default_micro_batch import with_micro_batch
from argosy.config.layout import check_world, describe_layout
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.plan.advise import STACK, work_of
from argosy.plan.calibration import Calibration, Stack, calibration
from argosy.plan.hardware import Cluster
from argosy.plan.layer import replays
from argosy.plan.layouts import Layout, Work
from argosy.plan.memory import StageMemory, stage_memory
from argosy.plan.own_layout import layout_of
from argosy.plan.plan_report import duration
from argosy.plan.time import MicroBatchTime, as_run, bubble_seconds, micro_batch_time, once_a_step


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
    # Tokens of a step.
    tokens: int
    passes: float
    communication: float
    bubble: float
    update: float
    # Overhead outside the layers, and the wait for the slowest node.
    rest: float

    @property
    def total(self) -> float:
        return self.passes + self.communication + self.bubble + self.update + self.rest

    def lines(self) -> list[str]:
        """Say what was measured, what is predicted, and the step that follows."""
        return [
            f"measured   compute and memory, here: passes of the slowest stage {duration(self.passes)}, update {duration(self.update)}",
            f"predicted  communication by the planner, for {self.cluster}: {duration(self.communication)} added; pipeline bubble "
            f"{duration(self.bubble)}, overhead and stragglers {duration(self.rest)}",
            f"step       {duration(self.total)}, {self.tokens / self.total:,.0f} tokens/s",
        ]

    def as_dict(self) -> dict[str, Any]:
        predicted = {"communication": self.communication, "bubble": self.bubble, "rest": self.rest}
        return {
            "cluster": self.cluster,
            "step_s": round(self.total, 6),
            "tokens_per_s": round(self.tokens / self.total, 1),
            "measured_s": {"passes": round(self.passes, 6), "update": round(self.update, 6)},
            "predicted_s": {name: round(seconds, 6) for name, seconds in predicted.items()},
        }


def with_graphs(spec: RunSpec, are_used: bool) -> RunSpec:
    """Return the spec of a run whose passes are CUDA graphs, or are not, whatever the clock says."""
    graph = "on" if are_used else "off"
    return spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"graph": graph})})


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

    def compute(self, stage: int, cluster: Cluster, *, launches: bool) -> Seconds:
        """Return the predicted compute of a rank of a stage in a step, if its collectives move nothing. With `launches`, the time in
        which it waits for its host is in it."""
        alone = self._micro_batch(cluster, alone=True)
        passes = self.micro_batches * alone.compute(stage, launches=launches)
        return Seconds(passes, self._once(cluster, alone, alone=True)[1])

    def replays(self, cluster: Cluster) -> bool:
        """Return whether passes would run as CUDA graphs on a cluster. Its ranks choose by the clock."""
        return replays(as_run(self.work, self.layout, cluster, self.stack, self.known), self.layout, self.stack)

    def _once(self, cluster: Cluster, micro: MicroBatchTime, *, alone: bool = False) -> tuple[float, float]:
        return once_a_step(self.work, self.layout, cluster, self.stack, self.known, micro, alone=alone)

    def _micro_batch(self, cluster: Cluster, *, alone: bool = False) -> MicroBatchTime:
        return micro_batch_time(self.work, self.layout, cluster, self.stack, self.known, alone=alone)

    def step(self, measured: Mapping[int, Seconds], cluster: Cluster) -> MeasuredStep:
        """Return the step that follows from the compute measured on one rank of some of the stages."""
        micro, alone = self._micro_batch(cluster), self._micro_batch(cluster, alone=True)
        m, stages = self.micro_batches, range(self.layout.pp)
        predicted = {stage: m * alone.compute(stage, launches=True) for stage in stages}
        # What communication adds: the time it is exposed, and what it slows down.
        added = [together - alone.compute(stage, launches=True) for stage, together in enumerate(micro.stages)]
        scale = mean(seconds.passes / predicted[stage] for stage, seconds in measured.items())
        passes = [measured[s].passes if s in measured else scale * predicted[s] for s in stages]
        busy = [passes[stage] / m + added[stage] for stage in stages]
        slowest = busy.index(max(busy))
        gradients, updating = self._once(cluster, micro)
        update = max(seconds.update for seconds in measured.values())
        communication = m * added[slowest] + gradients + updating - self._once(cluster, alone, alone=True)[1]
        bubble, outside = bubble_seconds(self.layout, m, busy), self.known.outside(self.stack)
        spent = passes[slowest] + communication + bubble + update + outside
        waiting = spent * self.known.constants["straggle"] * log2(max(1, cluster.nodes))
        return MeasuredStep(
            cluster.name, self.work.tokens, passes[slowest], communication, bubble, update, outside + waiting
        )


@dataclass(frozen=True)
class MeasuredPlan:
    """The plan of a run from what `argosy bench --world-size --json` measured. `memory` is the peak of each stage measured, in GiB."""

    device: str
    memory: dict[int, float]
    step: MeasuredStep

    def lines(self) -> list[str]:
        peaks = ", ".join(f"stage {stage} {peak:.1f}" for stage, peak in self.memory.items())
        return [
            f"the run spec's own layout, as measured on {self.device}:",
            f"  memory     {peaks} GiB at the peak",
            *(f"  {line}" for line in self.step.lines()),
        ]

    def as_dict(self) -> dict[str, Any]:
        return {"device": self.device, "memory_gib": self.memory, **self.step.as_dict()}


def read_measured(path: Path, spec: RunSpec, cluster: Cluster, *, has_open_micro_batch: bool = False) -> MeasuredPlan:
    """Read what `argosy bench RUN.yaml --world-size N --json` wrote, and plan the same run on a cluster with it.

    If the run spec has no micro-batch of its own, the plan is for the one that was measured.
    """
    try:
        found = orjson.loads(path.read_bytes())
        stages = {row["stage"]: row["measured"] for row in found["ranks"]}
        measured = {stage: Seconds(row["passes_s"], row["update_s"]) for stage, row in stages.items()}
        memory = {stage: float(row["memory_gib"]["peak"]) for stage, row in stages.items()}
        run = {key: found[key] for key in ("parameters", "layout", "global_batch", "seq_len", "micro_batches")}
        precision, device = str(found["precision"]), str(found["device"])
        # Files of earlier versions do not say it.
        if "cuda_graphs" in found:
            spec = with_graphs(spec, bool(found["cuda_graphs"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unusable(path, f"it is no output of `argosy bench --world-size N --json` ({error!r})") from None
    share = spec.train.global_batch // spec.parallel.data_parallel
    if has_open_micro_batch and isinstance(run["micro_batches"], int) and 1 <= run["micro_batches"] <= share:
        spec = with_micro_batch(spec, share // run["micro_batches"])
    plan = RankPlan.of(spec, precision)
    asked = {
        "parameters": count_parameters(spec.model).total,
        "layout": describe_layout(spec.parallel),
        "global_batch": spec.train.global_batch,
        "seq_len": spec.data.seq_len,
        "micro_batches": plan.micro_batches,
    }
    differing = [f"{key} {run[key]} and not {value}" for key, value in asked.items() if run[key] != value]
    if differing or not measured:
        raise _unusable(path, f"it was measured with {', '.join(differing)}" if differing else "it has no rank")
    check_world(spec.parallel, cluster.gpus, f"--cluster {cluster.name}", spec.train.global_batch)
    return MeasuredPlan(device, memory, plan.step(measured, cluster))


def _unusable(path: Path, why: str) -> ArgosyError:
    return ArgosyError(
        "plan.bad-question",
        f"{path} cannot be used for this run: {why}",
        key="--measured",
        value=path,
        fix=f"argosy bench RUN.yaml --world-size N --rank all-stages --json > {path}, with the keys of this command",
    )

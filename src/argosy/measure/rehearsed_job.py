"""The answer of `argosy bench --world-size`: ranks measured here beside the planner's prediction, and the step of the whole job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from argosy.config.counts import count_parameters
from argosy.config.layout import check_world, describe_layout
from argosy.config.schema import RunSpec
from argosy.measure.rank_steps import RankStep, effort_of, ranks_asked, require_room, run_ranks
from argosy.parallel.parallelize import graph_mode, graph_refusal
from argosy.parallel.precision import choose_precision
from argosy.plan.auto import cluster_of
from argosy.plan.hardware import Cluster, gpu_of_device, parse_cluster
from argosy.plan.measured_plan import MeasuredStep, RankPlan, Seconds, with_graphs
from argosy.plan.memory import StageMemory
from argosy.plan.plan_report import duration
from argosy.train.device import name_of, prepare_device

# The share of a step from which on a wait for the host is worth telling.
_WAITING = 0.1
_UNKNOWN = ["step       not predicted: the planner does not know the GPUs of this job; name them with --cluster"]


@dataclass(frozen=True)
class RankRow:
    """One rank: what was measured here, and what the planner predicts on the same device.

    `planned` is None on a device the planner does not know. `error` is measured against predicted."""

    measured: RankStep
    planned: Seconds | None
    memory: StageMemory
    on_gpu: bool

    @property
    def compute_error(self) -> float | None:
        """The error of the predicted time in which the GPU computes. How fast its host is, the planner does not know."""
        computed = self.measured.device
        return None if self.planned is None or computed is None else self.planned.total / computed.total - 1

    @property
    def waiting(self) -> float:
        """The share of the step in which the GPU waited for the host."""
        measured = self.measured
        return 0.0 if measured.device is None else max(0.0, 1 - measured.device.total / measured.compute.total)

    @property
    def memory_error(self) -> float | None:
        """The error of the predicted peak. On a CPU the peak of a process has more in it than a step."""
        return self.memory.allocated / self.measured.memory.peak - 1 if self.on_gpu else None

    def as_dict(self) -> dict[str, Any]:
        measured, planned = self.measured, self.planned
        return {
            "rank": measured.rank,
            "stage": measured.stage,
            "parameters": measured.parameters,
            "measured": {
                **_seconds(measured.compute),
                "device_s": None if measured.device is None else round(measured.device.total, 6),
                "memory_gib": measured.memory.as_dict(),
            },
            "planned": {
                **({} if planned is None else {"device_s": round(planned.total, 6)}),
                "memory_gib": self.memory.as_dict(),
            },
            "compute_error": self.compute_error,
            "memory_error": self.memory_error,
        }


@dataclass(frozen=True)
class RehearsedJob:
    """The measured ranks of a job. `step` is None where the planner does not know the job's hardware."""

    spec: RunSpec
    device: str
    precision: str
    micro_batches: int
    micro_batches_run: int
    steps: int
    rows: tuple[RankRow, ...]
    replayed: bool
    step: MeasuredStep | None
    # Whether passes, launched one by one by default, could be captured.
    can_capture: bool
    # The GPU of the job's cluster, if it is another one than the device here.
    elsewhere: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.spec.model.preset or self.spec.model.family,
            "parameters": count_parameters(self.spec.model).total,
            "world_size": self.spec.parallel.world_size,
            "layout": describe_layout(self.spec.parallel),
            "device": self.device,
            "job_gpu": self.elsewhere,
            "torch": torch.__version__,
            "precision": self.precision,
            "global_batch": self.spec.train.global_batch,
            "seq_len": self.spec.data.seq_len,
            "micro_batches": self.micro_batches,
            "micro_batches_run": self.micro_batches_run,
            "steps": self.steps,
            "cuda_graphs": self.replayed,
            "ranks": [row.as_dict() for row in self.rows],
            "plan": None if self.step is None else self.step.as_dict(),
        }

    def lines(self) -> list[str]:
        spec, run, whole = self.spec, self.micro_batches_run, self.micro_batches
        passed = f"all {whole} micro-batches" if run == whole else f"{run} of {whole} micro-batches, scaled to all"
        return [
            f"{spec.model.preset or spec.model.family}, {count_parameters(spec.model).total:,} parameters on "
            f"{spec.parallel.world_size:,} ranks: {describe_layout(spec.parallel)}",
            f"measured on {self.device}, torch {torch.__version__}, {self.precision}: {passed}{', as CUDA graphs' if self.replayed else ''}, the "
            f"median of {self.steps} steps; collectives move nothing",
            "",
            *_table(self.rows),
            *_waits(self.rows, can_capture=self.can_capture),
            "",
            *(_UNKNOWN if self.step is None else self.step.lines()),
            *(
                []
                if self.elsewhere is None
                else [f"warning: compute is that of {self.device}, and the job has {self.elsewhere}s"]
            ),
        ]


def rehearse_job(
    spec: RunSpec,
    world_size: int,
    rank: str,
    *,
    steps: int,
    warmup: int,
    micro_batches: int | None = None,
    cluster: str | None = None,
    ignore_memory: bool = False,
    trace: Path | None = None,
) -> RehearsedJob:
    """Run the step of one or several ranks of a job on this machine's device, and predict the step of the whole job.

    Args:
        rank: a rank's number, or `all-stages`.
        micro_batches: run only so many micro-batches of the step.
        cluster: the job's cluster as the planner names it; default: the run spec's, or this machine's GPU as many times.
        ignore_memory: run ranks for which the planner predicts more memory than the device has.
        trace: write one more step of the last rank here, for Perfetto.
    """
    check_world(spec.parallel, world_size, f"--world-size {world_size}", spec.train.global_batch)
    ranks = ranks_asked(spec, rank)
    device = prepare_device(spec.train, local_rank=0)
    name, precision = name_of(device), choose_precision(spec.train.precision, device)
    plan = RankPlan.of(spec, precision)
    effort = effort_of(spec, plan, steps=steps, warmup=warmup, micro_batches=micro_batches)
    nodes = job_cluster(spec, cluster, name)
    if not ignore_memory:
        require_room(spec, plan, ranks, device)
    can_capture = graph_mode(spec, graph_refusal(spec, precision, device)) == "advise"
    if world_size > 1 and spec.parallel.graph == "auto":
        # Here the clock would tell of sums of gradients that take no time.
        spec = with_graphs(spec, nodes is not None and plan.replays(nodes))
    measured = run_ranks(spec, ranks, effort, device, trace)
    replayed = all(one.replayed for one in measured)
    plan = RankPlan.of(with_graphs(spec, replayed), precision)
    gpu = None if name is None else gpu_of_device(name)
    here = None if gpu is None else parse_cluster(f"{world_size}x{gpu.name}")
    return RehearsedJob(
        spec=spec,
        device=name or "cpu",
        precision=precision,
        micro_batches=plan.micro_batches,
        micro_batches_run=effort.micro_batches,
        steps=steps,
        rows=tuple(_row(one, plan, here, device) for one in measured),
        replayed=replayed,
        can_capture=can_capture,
        step=None if nodes is None else plan.step({one.stage: one.compute for one in measured}, nodes),
        elsewhere=None if nodes is None or nodes.gpu == gpu else nodes.gpu.name,
    )


def _row(measured: RankStep, plan: RankPlan, here: Cluster | None, device: torch.device) -> RankRow:
    planned = None if here is None else plan.compute(measured.stage, here, launches=False)
    return RankRow(measured, planned, plan.memory(measured.stage), on_gpu=device.type == "cuda")


def job_cluster(spec: RunSpec, asked: str | None, device_name: str | None) -> Cluster | None:
    """Return the cluster of a job: the one asked for, the run spec's, or this machine's GPU as many times. None if it is unknown."""
    cluster = parse_cluster(asked) if asked else cluster_of(spec, device_name, spec.parallel.world_size)
    if cluster is not None:
        check_world(spec.parallel, cluster.gpus, f"--cluster {cluster.name}", spec.train.global_batch)
    return cluster


def _seconds(seconds: Seconds) -> dict[str, float]:
    parts = {"passes_s": seconds.passes, "update_s": seconds.update, "compute_s": seconds.total}
    return {name: round(value, 6) for name, value in parts.items()}


def _table(rows: Sequence[RankRow]) -> list[str]:
    """Return the ranks as lines: measured time and memory, those of the planner, and its errors."""
    cells = [["stage", "rank", "passes", "update", "on the GPU", "planned", "error", "memory", "planned", "error"]]
    for row in rows:
        measured, planned, computed = row.measured, row.planned, row.measured.device
        cells.append([
            str(measured.stage), str(measured.rank), duration(measured.compute.passes), duration(measured.compute.update),
            "n/a" if computed is None else duration(computed.total), "n/a" if planned is None else duration(planned.total),
            _percent(row.compute_error), f"{measured.memory.peak:.2f} GiB", f"{row.memory.allocated:.2f} GiB",
            _percent(row.memory_error),
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def _waits(rows: Sequence[RankRow], *, can_capture: bool) -> list[str]:
    """Say if the GPU waited for this machine's host."""
    most = max(rows, key=lambda row: row.waiting)
    if most.waiting < _WAITING:
        return []
    return [
        f"the GPU waited for this machine's host in {most.waiting:.0%} of the step of rank {most.measured.rank}; a larger parallel.micro_batch or "
        "less parallel.tp gives it more to do for each kernel that is launched"
        + (", and parallel.graph=on launches all kernels of a pass at once" if can_capture else "")
    ]


def _percent(error: float | None) -> str:
    return "n/a" if error is None else f"{error:+.1%}"

"""`argosy bench --world-size`: the real step of one rank of a large job, on the one device at hand.

The rank is built as in training, and its kernels and memory are real. The other ranks do not exist: collectives return at once, as if
every peer had sent what this rank sends. Loss and gradients therefore mean nothing, and no guard judges them.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch

from argosy.compat.absent_peers import fake_ranks
from argosy.config.pipeline import check_micro_batches
from argosy.config.schema import RunSpec
from argosy.console.progress_bar import ProgressBar
from argosy.data.synthetic import synthetic_batch
from argosy.errors import ArgosyError
from argosy.measure.device_clock import DeviceClock, DeviceTime
from argosy.model.build import fill_like_initial
from argosy.parallel.engine import Engine, ignore_phase
from argosy.parallel.mesh import Mesh, make_mesh
from argosy.parallel.parallelize import parallelize
from argosy.parallel.shards import local
from argosy.plan.hardware import GIB
from argosy.plan.measured_plan import RankPlan, Seconds
from argosy.plan.memory import in_flight
from argosy.train.device import Memory, measure_memory, memory_of
from argosy.train.kernel_profile import profile_step
from argosy.train.optimizer import Optimizer
from argosy.train.session import parameter_names
from argosy.train.step import take_step

ALL_STAGES = "all-stages"
# Begins a step on the clock.
_STEP = "step"
# The phase of the micro-batches.
_PASSES = "forward_backward"


@dataclass(frozen=True)
class RankStep:
    """The measured step of one rank. Times are those of the whole step, even if fewer micro-batches were run."""

    rank: int
    # The place of the rank in its pipeline.
    stage: int
    parameters: int
    # By the clock.
    compute: Seconds
    # In which the GPU computed: the rest of `compute` it waited for the host. None on a CPU.
    device: Seconds | None
    memory: Memory
    # Whether its passes were CUDA graphs.
    replayed: bool


@dataclass(frozen=True)
class Effort:
    """How much of a job is run: the steps that are timed, those before them, and the micro-batches of each."""

    steps: int
    warmup: int
    micro_batches: int


def ranks_asked(spec: RunSpec, rank: str) -> list[int]:
    """Return the ranks that `--rank` names: a number, or one rank of each pipeline stage."""
    world = spec.parallel.world_size
    if rank == ALL_STAGES:
        return list(range(0, world, world // spec.parallel.pp))
    if not rank.isdecimal() or int(rank) >= world:
        raise ArgosyError(
            "config.bad-value",
            f"the ranks of this layout are 0 to {world - 1}",
            key="--rank",
            value=rank,
            fix=f"a number from 0 to {world - 1}, or {ALL_STAGES} for one rank of each pipeline stage",
        )
    return [int(rank)]


def stage_of(spec: RunSpec, rank: int) -> int:
    """Return the place of a rank in its pipeline: pp is the outermost axis of the mesh."""
    return rank * spec.parallel.pp // spec.parallel.world_size


def effort_of(spec: RunSpec, plan: RankPlan, *, steps: int, warmup: int, micro_batches: int | None) -> Effort:
    """Return how much is run. Fewer micro-batches than a step has must still reach its memory, and fit its schedule."""
    if micro_batches is None or micro_batches >= plan.micro_batches:
        return Effort(steps, warmup, plan.micro_batches)
    held = max(ceil(in_flight(plan.layout, plan.micro_batches, stage)) for stage in range(plan.layout.pp))
    least = max(held, min(2, plan.micro_batches))
    if micro_batches < least:
        raise ArgosyError(
            "config.bad-value",
            f"a rank of this layout holds {held} of the {plan.micro_batches} micro-batches of a step at once, and accumulates gradients over "
            f"two or more: {micro_batches} would need less memory than the step",
            key="--micro-batches",
            value=micro_batches,
            fix=f"--micro-batches {least} or more, or leave it out to run all {plan.micro_batches}",
        )
    check_micro_batches(spec, micro_batches * spec.parallel.micro_batch * spec.parallel.data_parallel, {})
    return Effort(steps, warmup, micro_batches)


def require_room(spec: RunSpec, plan: RankPlan, ranks: list[int], device: torch.device) -> None:
    """Refuse ranks for which the planner predicts more memory than the device has, before anything is built."""
    there = memory_of(device) / GIB
    for rank in ranks:
        stage = stage_of(spec, rank)
        predicted = plan.memory(stage)
        # Allocator and CUDA context take memory on a GPU only.
        overhead = predicted.overhead if device.type == "cuda" else 0.0
        need = predicted.allocated + overhead
        if need > there:
            parts = {**predicted.as_dict(), "overhead": overhead, "allocated": 0.0, "device": 0.0}
            raise ArgosyError(
                "device.out-of-memory",
                f"rank {rank} (stage {stage} of {spec.parallel.pp}) would need {need:,.1f} GiB by the planner's count: "
                f"{', '.join(f'{name} {size:,.1f}' for name, size in parts.items() if size >= 0.05)}; and "
                f"{'this machine' if device.type == 'cpu' else 'the GPU'} has {there:,.1f}",
                key="parallel",
                value=str(plan.layout),
                fix="parallel.recompute=full, a smaller parallel.micro_batch, or more tp, pp or dp_shard (`argosy plan` finds a "
                "layout); --ignore-memory runs it nevertheless",
            )


def run_ranks(
    spec: RunSpec, ranks: list[int], effort: Effort, device: torch.device, trace: Path | None = None
) -> list[RankStep]:
    """Run the step of each rank in turn, and free the device after each. A trace of one more step of the last is written."""
    found = []
    with ProgressBar("running ranks", len(ranks), " ranks") as progress:
        for rank in ranks:
            found.append(run_rank(spec, rank, effort, device, trace if rank == ranks[-1] else None))
            # FSDP and autograd leave reference cycles.
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            progress.advance(1)
    return found


def run_rank(spec: RunSpec, rank: int, effort: Effort, device: torch.device, trace: Path | None = None) -> RankStep:
    """Run steps of one rank as in training, on a device and without its peers."""
    world = spec.parallel.world_size
    if world == 1:
        return measure_on(spec, Mesh(device), effort, trace)
    with fake_ranks(rank, world):
        return measure_on(spec, make_mesh(spec.parallel, device), effort, trace)


def measure_on(spec: RunSpec, mesh: Mesh, effort: Effort, trace: Path | None = None) -> RankStep:
    """Run steps on this rank of a mesh, whether its peers exist or not."""
    device = mesh.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    engine, optimizer = _start(spec, mesh)
    batch = engine.place(synthetic_batch(spec, effort.micro_batches * spec.parallel.micro_batch))
    for step in range(1, effort.warmup + 1):
        take_step(engine, optimizer, batch, step=step, lr=spec.optim.lr)
    clock = DeviceClock(device)
    engine.on_phase = clock.mark
    for step in range(effort.warmup + 1, effort.warmup + effort.steps + 1):
        clock.mark(_STEP)
        take_step(engine, optimizer, batch, step=step, lr=spec.optim.lr, enter=clock.mark)
    clock.mark("end")
    scale = spec.train.global_batch / (spec.parallel.micro_batch * spec.parallel.data_parallel * effort.micro_batches)
    compute = _seconds(clock.intervals_ms(), scale)

    def once_more(enter: Callable[[str], None] = ignore_phase) -> None:
        engine.on_phase = enter
        take_step(engine, optimizer, batch, step=step + 1, lr=spec.optim.lr, enter=enter)

    computing = DeviceTime(device)
    if device.type == "cuda":
        once_more(computing.mark)
        computing.end()
    if trace is not None:
        profile_step(once_more, device, trace)
    return RankStep(
        rank=mesh.rank,
        stage=stage_of(spec, mesh.rank),
        parameters=sum(local(parameter).numel() for parameter in engine.model.parameters()),
        compute=compute,
        device=_computed(computing.seconds, scale),
        memory=measure_memory(engine.model, optimizer, device, accumulated=engine.accumulates(len(batch.tokens))),
        replayed=engine.uses_cuda_graph,
    )


def _start(spec: RunSpec, mesh: Mesh) -> tuple[Engine, Optimizer]:
    engine = parallelize(spec, mesh)
    optimizer = Optimizer(engine.model, spec.optim, names=parameter_names(spec) if mesh.size("pp") > 1 else None)
    with torch.no_grad():
        for name, weight in optimizer.weights().items():
            fill_like_initial(name, local(weight), spec.model)
    optimizer.write_parameters()
    return engine, optimizer


def _computed(seconds: dict[str, float], scale: float) -> Seconds | None:
    """Return the compute of a step from the seconds of its phases. None if the profiler saw no kernels."""
    rest = sum(spent for name, spent in seconds.items() if name != _PASSES)
    found = Seconds(scale * seconds.get(_PASSES, 0.0), rest)
    return found if found.total else None


def _seconds(intervals: list[tuple[str, float]], scale: float) -> Seconds:
    """Return the median compute of a step. Only the passes grow with the number of micro-batches."""
    passes, updates = [], []
    for name, ms in intervals:
        if name == _STEP:
            passes.append(0.0)
            updates.append(0.0)
        (passes if name == _PASSES else updates)[-1] += ms / 1000
    return Seconds(scale * statistics.median(passes), statistics.median(updates))

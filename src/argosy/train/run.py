"""A run from its spec to its exit code: the ranks join, the trainer is built, the run directory is opened by the first rank.

Whatever can be refused is refused before the run directory is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import orjson
import torch

from argosy.checkpoint.assets import copy_assets
from argosy.checkpoint.source import Source
from argosy.checkpoint.store import listed
from argosy.config.layout import check_world
from argosy.config.resolve import Resolved
from argosy.config.schema import TrainSpec
from argosy.config.start import MODEL_FILE
from argosy.errors import ArgosyError
from argosy.files import replace_file
from argosy.parallel.mesh import Mesh, joined
from argosy.plan.advise import predict
from argosy.plan.auto import cluster_of, is_open, settle_layout
from argosy.record.heartbeat import Heartbeat, clear_heartbeats
from argosy.record.jsonl import JsonlWriter, now
from argosy.record.rundir import RunDir
from argosy.record.sink_process import serve_sinks
from argosy.record.sinks.asked import require_packages
from argosy.supervise.rank_files import RankFiles
from argosy.supervise.rank_process import open_heartbeat
from argosy.supervise.world import find_world
from argosy.train.device import machine_facts, name_of, prepare_device
from argosy.train.loop import Trainer
from argosy.train.opening import Opening
from argosy.train.profile_steps import Window


@dataclass(frozen=True)
class TrainOptions:
    fresh: bool = False  # start anew; refuse if the run directory holds a run
    archive: bool = False  # with fresh: move the earlier run aside
    quiet: bool = False
    profile: str | None = None  # steps to look at with torch's profiler, as 10:13
    ends_process: bool = False  # the process ends with the run: once that is saved, no signal changes its exit code


def settle(resolved: Resolved, source: Path | None, overrides: Sequence[str], ranks: int) -> Resolved:
    """The run with a layout for so many ranks, where its spec leaves that open."""
    if ranks == 1 or not is_open(resolved):
        return resolved
    spec = resolved.spec
    return settle_layout(resolved, source, overrides, ranks, cluster_of(spec, _gpu_name(spec.train), ranks))


def _gpu_name(spec: TrainSpec) -> str | None:
    return torch.cuda.get_device_name() if spec.device != "cpu" and torch.cuda.is_available() else None


def train(resolved: Resolved, source: Path | None, options: TrainOptions) -> int:
    """Train, or go on training, until the run's length is reached, as one of the ranks there are. Returns the exit code."""
    spec, world = resolved.spec, find_world(os.environ)
    check_world(spec.parallel, world.size, world.source, spec.train.global_batch)
    require_packages(spec.log)
    device = prepare_device(spec.train, local_rank=None if world.size == 1 else world.local_rank)
    with open_heartbeat(world.rank) as heartbeat, joined(spec.parallel, world, device) as mesh:
        trainer = Trainer(spec, mesh, heartbeat)  # refuses whatever can be refused before the run directory is touched
        trainer.profile = None if options.profile is None else Window.parse(options.profile, trainer.steps)
        run = RunDir(Path(spec.runs_dir) / spec.name)
        opened = mesh.on_first(lambda: _open(run, trainer, resolved, source, options))
        try:
            stalls = (run.events, spec.log.alerts.stall_s) if mesh.is_first else None
            heartbeat.publish(run.heartbeats, world.size, stalls=stalls)
            if not mesh.is_first:
                trainer.start_from(run)
            with (
                serve_sinks(run, spec) if mesh.is_first else nullcontext(),
                JsonlWriter(run.metrics) as metrics,
                JsonlWriter(run.events) as events,
                _told(events, mesh, heartbeat),
            ):
                return trainer.fit(run, metrics, events, opened, quiet=options.quiet, ends_process=options.ends_process)
        finally:
            run.close()


@contextmanager
def _told(events: JsonlWriter, mesh: Mesh, heartbeat: Heartbeat) -> Iterator[None]:
    """A failure is put on the record: by the first rank where all refuse alike; what ends one rank by itself, unless an agent tells
    of it, which knows what the others did."""
    try:
        yield
    except Exception as error:
        refusal = isinstance(error, ArgosyError)
        if mesh.is_first if refusal else RankFiles.of(os.environ) is None:
            about = (
                error.as_dict()
                if isinstance(error, ArgosyError)
                else {"cause": f"{type(error).__name__}: {error}"[:2000]}
            )
            events.write({"event": "failed", "step": heartbeat.step, "time": now(), "rank": mesh.rank, **about})
        raise


def _open(
    run: RunDir, trainer: Trainer, resolved: Resolved, source: Path | None, options: TrainOptions
) -> tuple[Opening, list[str]]:
    """The run directory with its lock held, an earlier run moved aside if that was asked for, and checked to be one that can go on.
    Returns its record, and what is worth knowing about it."""
    check_options(run, options)
    occupied = run.holds_a_run
    run.open_for_training()
    try:
        if options.fresh and occupied:
            print(f"the earlier run is now {run.archive()}")
            run.open_for_training()
        machine = machine_facts(trainer.device, trainer.spec.train.precision)
        text = None if source is None else source.read_text(encoding="utf-8")
        opening = Opening(run, resolved, text, trainer.data.facts(), machine)
        notes = opening.check()
        start = trainer.start_from(run)
        opening.start = None if start is None else start.facts()
        opening.beside = lambda: _store_beside(run, trainer, start)
        if listed(run.checkpoints):
            run.require_room()
        else:
            opening.store(0)
        clear_heartbeats(run.heartbeats)
    except BaseException:
        run.close()
        raise
    return opening, notes


def _store_beside(run: RunDir, trainer: Trainer, start: Source | None) -> None:
    """The prediction, the tokenizer, and what belongs to the model the run started from."""
    _store_plan(run, trainer)
    if trainer.data.tokenizer is not None:
        name, content = trainer.data.tokenizer.stored()
        replace_file(run.root / name, content)
    if start is not None and start.reads(trainer.data.tokenizer):
        copy_assets(start.root, run.root)


def _store_plan(run: RunDir, trainer: Trainer) -> None:
    """What the planner says of this layout on these GPUs, for whoever compares it with what was measured."""
    spec, ranks = trainer.spec, trainer.mesh.world_size
    cluster = cluster_of(spec, name_of(trainer.device), ranks)
    prediction = None if cluster is None else predict(spec, cluster)
    if prediction is None:
        run.plan_file.unlink(missing_ok=True)
    else:
        replace_file(run.plan_file, orjson.dumps({"cluster": cluster, **prediction}, option=orjson.OPT_INDENT_2))


def check_options(run: RunDir, options: TrainOptions) -> None:
    if (run.root / MODEL_FILE).exists():
        raise ArgosyError(
            "run.exists",
            f"{run.root} is an imported model, not a run",
            key="name",
            value=run.root.name,
            fix=f"give the run another name=…, and init_from={run.root} to start from it",
        )
    if options.archive and not options.fresh:
        raise ArgosyError(
            "config.conflict",
            "--archive moves a run aside to start a fresh one",
            key="--archive",
            fix="add --fresh, or leave it out",
        )
    if options.fresh and run.holds_a_run and not options.archive:
        raise ArgosyError(
            "run.exists",
            f"{run.root} already holds a run, and --fresh would start over it",
            key="name",
            value=run.root.name,
            fix="give another name=…, or --fresh --archive to move the earlier run aside; without --fresh it goes on",
        )

"""A run from its spec to its exit code: joins the ranks, builds the trainer, and opens the run directory on the first rank.

All checks that can refuse a run come before the run directory is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import torch

from argosy.checkpoint.assets import copy_assets
from argosy.checkpoint.source import Source
from argosy.checkpoint.store import listed, step_of
from argosy.config.layout import check_world
from argosy.config.overrides import Override
from argosy.config.resolve import Resolved
from argosy.config.schema import RunSpec, TrainSpec
from argosy.config.start import MODEL_FILE
from argosy.errors import ArgosyError
from argosy.files import replace_file
from argosy.parallel.mesh import Mesh, joined
from argosy.record.heartbeat import Heartbeat, clear_heartbeats
from argosy.record.jsonl import JsonlWriter, Record, now
from argosy.record.rundir import RunDir
from argosy.record.sink_process import require_packages, serve_sinks
from argosy.supervise.rank_process import RankFiles, open_heartbeat
from argosy.supervise.world import World, find_world
from argosy.train.device import machine_facts, name_of, prepare_device
from argosy.train.loop import Trainer
from argosy.train.opening import Journal, Opening
from argosy.train.session import Session, open_session
from argosy.untrusted import MIB, read_regular

if TYPE_CHECKING:
    from argosy.train.profile_steps import Window


@dataclass(frozen=True)
class TrainOptions:
    """How to start a run, beside its spec."""

    # Start a new run; refuse if the run directory holds a run.
    fresh: bool = False
    # With fresh: move the earlier run aside.
    archive: bool = False
    quiet: bool = False
    # Steps to profile with torch's profiler, such as 10:13.
    profile: str | None = None
    # The process ends with the run: after the last save no signal changes its exit code.
    ends_process: bool = False
    # Called by the first rank with every record of metrics.
    on_record: Callable[[Record], None] | None = None


def settle(
    resolved: Resolved,
    source: Path | Mapping[str, Any] | None,
    overrides: Sequence[Override],
    ranks: int,
    *,
    fresh: bool = False,
) -> Resolved:
    """Return the run with a layout for `ranks` ranks and a micro-batch, as far as its spec leaves them open.

    Args:
        fresh: nothing of an earlier run in the run directory is kept.
    """
    gpu, kept = _gpu_name(resolved.spec.train), None if fresh else _kept_micro_batch(resolved.spec)
    if ranks == 1 and gpu is None and kept is None:
        return resolved
    from argosy.plan.auto import cluster_of, is_open, settle_layout, settle_micro_batch

    planned_on = cluster_of(resolved.spec, gpu, ranks) if gpu is not None or is_open(resolved) else None
    resolved = settle_layout(resolved, source, overrides, ranks, planned_on)
    return settle_micro_batch(resolved, None if gpu is None else planned_on, kept)


def _kept_micro_batch(spec: RunSpec) -> int | None:
    """Return the micro-batch with which the run's newest checkpoint was made; None without a checkpoint."""
    run = RunDir(Path(spec.runs_dir) / spec.name)
    checkpoints = listed(run.checkpoints)
    # A record that cannot be read is refused when the run directory is opened.
    with suppress(ArgosyError):
        before = run.spec_at(step_of(checkpoints[0])) if checkpoints else None
        return None if before is None else before.parallel.micro_batch
    return None


def _gpu_name(spec: TrainSpec) -> str | None:
    return torch.cuda.get_device_name() if spec.device != "cpu" and torch.cuda.is_available() else None


def train(resolved: Resolved, source: Path | None, options: TrainOptions, world: World | None = None) -> int:
    """Start or resume training as one rank of the world, until the run's length is reached. Returns the exit code.

    Args:
        source: the file of the run spec, kept with the run.
        world: the rank of this process and the world size. None: read from the environment.
    """
    spec, world = resolved.spec, world or find_world(os.environ)
    check_world(spec.parallel, world.size, world.source, spec.train.global_batch)
    require_packages(spec.log)
    device = prepare_device(spec.train, local_rank=None if world.size == 1 else world.local_rank)
    with (
        open_heartbeat(world.rank) as heartbeat,
        _compiling_ahead(spec, device, world),
        joined(spec.parallel, world, device) as mesh,
    ):
        session = open_session(spec, mesh)
        profile = profile_window(options, session.steps)
        run = RunDir(Path(spec.runs_dir) / spec.name)
        opened = mesh.on_first(lambda: _open(run, session, resolved, source, options))
        try:
            stalls = (run.events, spec.log.alerts.stall_s) if mesh.is_first else None
            heartbeat.publish(run.heartbeats, world.size, stalls=stalls)
            opening, start, notes = opened or (None, session.starting_source(run), [])
            with (
                serve_sinks(run, spec) if mesh.is_first else nullcontext(),
                JsonlWriter(run.metrics) as metrics,
                JsonlWriter(run.events) as events,
                _told(events, mesh, heartbeat),
            ):
                journal = Journal(run, metrics, events, writes=mesh.is_first, on_record=options.on_record)
                trainer = Trainer(session, journal, heartbeat, opening=opening, start=start, profile=profile)
                return trainer.fit(notes, quiet=options.quiet, ends_process=options.ends_process)
        finally:
            run.close()


def _compiling_ahead(spec: RunSpec, device: torch.device, world: World) -> AbstractContextManager[None]:
    """Return a context in which one process on each machine compiles the kernels of a GPU."""
    if device.type != "cuda" or world.local_rank:
        return nullcontext()
    from argosy.train.compile_ahead import compiling_ahead

    return compiling_ahead(spec, device)


def profile_window(options: TrainOptions, steps: int) -> Window | None:
    """Return the steps to profile; refuse those that a run of `steps` steps does not have."""
    if options.profile is None:
        return None
    from argosy.train.profile_steps import Window

    return Window.parse(options.profile, steps)


@contextmanager
def _told(events: JsonlWriter, mesh: Mesh, heartbeat: Heartbeat) -> Iterator[None]:
    """Write a failure in this block to the events. The first rank writes an ArgosyError, which all ranks raise. Any other
    exception is written by the rank that raised it, unless a supervisor reports it, which knows what the other ranks did."""
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
    run: RunDir, session: Session, resolved: Resolved, source: Path | None, options: TrainOptions
) -> tuple[Opening, Source | None, list[str]]:
    """Open and lock the run directory, archive an earlier run if asked to, and check that the run can start or resume.

    Returns its record, the weights it starts from and messages about the directory."""
    check_options(run, options)
    replaces, notes = options.fresh and run.holds_a_run, []
    run.open_for_training()
    try:
        # The last refusal of the start: after it, the earlier run may be moved.
        start = session.starting_source(run, fresh=replaces)
        if replaces:
            notes.append(f"the earlier run is now {run.archive()}")
            run.open_for_training()
        opening = Opening(
            run,
            resolved,
            None if source is None else source.read_text(encoding="utf-8"),
            session.data.facts(),
            machine_facts(session.device, session.spec.train.precision),
            start=None if start is None else start.facts(),
            beside=lambda: _store_beside(run, session, start),
        )
        notes += opening.check()
        if listed(run.checkpoints):
            run.require_room()
        else:
            opening.store(0)
        clear_heartbeats(run.heartbeats)
    except BaseException:
        run.close()
        raise
    return opening, start, notes


def _store_beside(run: RunDir, session: Session, start: Source | None) -> None:
    """Store the prediction, the tokenizer, the chat template, and the assets of the model that the run started from."""
    _store_plan(run, session)
    tokenizer = session.data.tokenizer
    if tokenizer is not None:
        name, content = tokenizer.stored()
        replace_file(run.root / name, content)
    if (template := session.data.chat_template) is not None:
        replace_file(run.root / template.name, read_regular(template, MIB))
    if start is not None and start.reads(tokenizer):
        copy_assets(start.root, run.root)


def _store_plan(run: RunDir, session: Session) -> None:
    """Store the planner's prediction for this layout on these GPUs, to be compared with measurements."""
    run.plan_file.unlink(missing_ok=True)
    spec, gpu = session.spec, name_of(session.device)
    if gpu is None and spec.cluster is None:
        return
    from argosy.plan.advise import predict
    from argosy.plan.auto import cluster_of

    cluster = cluster_of(spec, gpu, session.mesh.world_size)
    if cluster is not None and (prediction := predict(spec, cluster)) is not None:
        replace_file(run.plan_file, orjson.dumps({"cluster": cluster.name, **prediction}, option=orjson.OPT_INDENT_2))


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

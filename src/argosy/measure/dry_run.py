"""`argosy train --dry-run`: every check of a start, and a description of the run. It writes nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from argosy.checkpoint.store import latest
from argosy.config.counts import describe_size
from argosy.config.data_checks import unused_share
from argosy.config.layout import check_world
from argosy.config.resolve import Resolved
from argosy.measure.rehearsal import describe_rehearsal, rehearse
from argosy.parallel.mesh import Mesh
from argosy.parallel.precision import slow_precision
from argosy.record.rundir import RunDir
from argosy.record.sink_process import require_packages
from argosy.supervise.world import World
from argosy.train.device import machine_facts, prepare_device, require_memory
from argosy.train.opening import Opening
from argosy.train.run import TrainOptions, check_options, profile_window
from argosy.train.session import open_session


def dry_run(
    resolved: Resolved, options: TrainOptions, world: World | None = None, elsewhere: int | None = None
) -> list[str]:
    """Run every check that `train` makes before its first step among the ranks of `world`, and describe the run.

    Args:
        elsewhere: number of ranks of another machine: describe what each would hold, and do not check this machine's device.
    """
    spec, world = resolved.spec, world or World()
    if elsewhere is None:
        require_packages(spec.log)
        check_world(spec.parallel, world.size, world.source, spec.train.global_batch)
        device = prepare_device(spec.train)
        layout = [f"device  {device}"]
        if slow := slow_precision(spec.train.precision, device):
            layout.append(f"warning: {slow}")
        # With several ranks, this process is none of them.
        machine = machine_facts(device, spec.train.precision) if world.size == 1 else None
    else:
        layout, machine = [], None
    session = open_session(spec, Mesh(torch.device("meta")))
    if elsewhere is None:
        require_memory(spec, device, ranks=world.size // spec.parallel.dp_replicate)
    profile_window(options, session.steps)
    run = RunDir(Path(spec.runs_dir) / spec.name)
    check_options(run, options)
    run.require_writable()
    notes = [] if (unused := unused_share(spec)) is None else [f"warning: {unused}"]
    opening = Opening(run, resolved, None, session.data.facts(), machine)
    notes += [] if options.fresh else opening.check()
    checkpoint = None if options.fresh else latest(run.checkpoints, report=notes.append)
    if checkpoint is not None:
        changes = opening.changes(checkpoint.progress.step)
        notes += [f"changed since the last start: {change}" for change in changes]
        notes += session.schedule_notes(run, checkpoint.progress.step, changes)
    elif (start := session.starting_source(run, fresh=options.fresh)) is not None:
        notes.append(f"weights {start.where}, trained to step {start.step}")
    if elsewhere is not None:
        # Last: for thousands of ranks it takes longer than everything else.
        layout += describe_rehearsal(spec, rehearse(spec, elsewhere))
    done = 0 if checkpoint is None else checkpoint.progress.step
    tokens = sum(session.data.split(corpus, "train").tokens for corpus in session.data.corpora)
    left = (
        f"steps {done + 1} to {session.steps}"
        if done < session.steps
        else f"nothing: all {session.steps} steps are done"
    )
    return [
        f"model   {describe_size(spec.model)}",
        f"data    {tokens:,} training tokens, {session.stream.epoch_samples:,} samples of {spec.data.seq_len}",
        f"train   {left}, {session.batches.describe(spec.data.seq_len)}",
        f"run     {run.root}" + (f" goes on from step {done}" if done else " starts at step 0"),
        *layout,
        *notes,
    ]

"""The `argosy train` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.arguments import RUN_HELP, RUN_METAVAR, require_run, run_and_overrides, without_option
from argosy.errors import ArgosyError


def train(
    arguments: Annotated[list[str] | None, typer.Argument(help=RUN_HELP, metavar=RUN_METAVAR)] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from scratch; refuses if the run directory contains a run.")
    ] = False,
    archive: Annotated[bool, typer.Option("--archive", help="With --fresh: move the earlier run aside first.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the spec and the data, describe the run, and stop.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Start and supervise this many ranks on this machine; the layout is `parallel` in the spec.",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --dry-run: build the layout for this many ranks, without starting them, and show what each holds.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Steps to profile with torch's profiler; 10:13 is 10, 11 and 12. Prints kernel times and, of several ranks, exposed "
            "communication by axis.",
            metavar="FIRST:LAST",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Only metrics.jsonl and events.jsonl; nothing on the console.")
    ] = False,
) -> None:
    """Train a model, or resume a run.

    A run directory with a checkpoint is resumed from the newest good one, bit for bit. On Ctrl-C, SIGTERM or SIGUSR1 the run
    finishes the step, saves, and exits with code 75: run the same command again to resume.

    Under torchrun, srun, JobSet, PyTorchJob or TrainJob the command finds its rank in the environment. With `--nproc` it starts
    and supervises the ranks itself, and restarts all of them from the last good checkpoint if one dies or hangs (`fault` in the
    spec; the evidence is in the run's events.jsonl and debug/).
    """
    from argosy.config.layout import check_world
    from argosy.config.resolve import resolve

    path, overrides = run_and_overrides(arguments)
    path = require_run(path)
    if world_size is not None and not dry_run:
        raise ArgosyError(
            "config.conflict",
            "--world-size is for --dry-run only; a real run counts its ranks",
            key="--world-size",
            value=world_size,
            fix="add --dry-run, or remove --world-size",
        )
    resolved = resolve(path, overrides)
    from argosy.record.rundir import RunDir
    from argosy.supervise.world import find_nodes, find_world

    directory = RunDir(Path(resolved.spec.runs_dir) / resolved.spec.name)
    nodes = find_nodes(os.environ)
    world = find_world(os.environ) if nproc is None else nodes.with_ranks(nproc)
    if nproc is not None and not dry_run:
        from argosy.plan.auto import check_open_layout

        spec = resolved.spec
        if not check_open_layout(resolved, path, overrides, world.size):
            check_world(spec.parallel, world.size, world.source, spec.train.global_batch)
        from argosy.supervise.agent import start_ranks

        arguments = without_option(sys.argv[1:], "--nproc")
        raise typer.Exit(start_ranks(nproc, nodes, arguments, directory, spec.fault))
    from argosy.supervise.rank_process import attempt, keep_output, run_as_rank

    output = None if dry_run else keep_output(directory, world)
    from argosy.train import run

    if attempt(os.environ) > 0:
        # Ranks that are started again get the same command, and resume the run that their first start began.
        fresh = archive = False
    options = run.TrainOptions(fresh=fresh, archive=archive, quiet=quiet, profile=profile, ends_process=True)
    if output is None:
        from argosy.measure.dry_run import dry_run as check

        settled = run.settle(resolved, path, overrides, world_size or world.size, fresh=fresh)
        print("\n".join(check(settled, options, world, world_size)))
        return

    def train_settled() -> int:
        with output:
            settled = run.settle(resolved, path, overrides, world.size, fresh=fresh)
            return run.train(settled, path, options, world)

    raise typer.Exit(run_as_rank(train_settled, world.rank))

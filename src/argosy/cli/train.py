"""argosy train"""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.arguments import RUN_HELP, RUN_METAVAR, require_run, run_and_overrides


def train(
    arguments: Annotated[list[str] | None, typer.Argument(help=RUN_HELP, metavar=RUN_METAVAR)] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew; refuses if the run directory holds a run.")
    ] = False,
    archive: Annotated[bool, typer.Option("--archive", help="With --fresh: move the earlier run aside first.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the spec and the data, say what would run, stop.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Only metrics.jsonl and events.jsonl; nothing on the console.")
    ] = False,
) -> None:
    """Train a model, or go on where the run stopped.

    A run directory with a checkpoint is continued from the newest good one, bit for bit. Ctrl-C or SIGTERM finishes
    the step, saves, and leaves with exit code 75: run the same command again to go on.
    """
    from argosy.config.resolve import resolve

    path, overrides = run_and_overrides(arguments)
    path = require_run(path)
    resolved = resolve(path, overrides)
    from argosy.train import loop

    options = loop.TrainOptions(fresh=fresh, archive=archive, quiet=quiet)
    if dry_run:
        print("\n".join(loop.dry_run(resolved, options)))
        return
    raise typer.Exit(loop.train(resolved, path, options))

"""The `argosy data build` command."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from argosy.cli.arguments import RUN_HELP, RUN_METAVAR, require_run, run_and_overrides


class Only(StrEnum):
    fetch = "fetch"
    prepare = "prepare"


def build(
    arguments: Annotated[list[str] | None, typer.Argument(help=RUN_HELP, metavar=RUN_METAVAR)] = None,
    only: Annotated[Only | None, typer.Option(help="Only fetch, or only prepare.")] = None,
) -> None:
    """Make the missing corpora of a run spec.

    A corpus with a recipe (data.train.N.prepare) is fetched, curated if the recipe has steps, and prepared unless it exists.

    It can be run again at any time. Pods of an Indexed Job and tasks of a Slurm array divide the work by their index; `argosy
    launch` starts them. Exit code 75: run the same command again; the file system failed, or it has no locks and shares of others are missing.
    """
    from argosy.config.resolve import resolve
    from argosy.data.build_corpora import awaits_others, share_of
    from argosy.data.build_corpora import build as run
    from argosy.errors import EXIT_RESUMABLE

    path, overrides = run_and_overrides(arguments)
    spec = resolve(require_run(path), overrides, elsewhere=True).spec
    for line in run(spec, share_of(os.environ), only):
        print(line, flush=True)
    if only is not Only.fetch and awaits_others(spec):
        raise typer.Exit(EXIT_RESUMABLE)

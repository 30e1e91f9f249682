"""argosy launch"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.arguments import RUN_HELP, RUN_METAVAR, require_run, run_and_overrides


class Target(StrEnum):
    local = "local"
    slurm = "slurm"
    jobset = "jobset"
    indexed_job = "indexed-job"
    pytorchjob = "pytorchjob"
    trainjob = "trainjob"
    hyperpod = "hyperpod"


def launch(
    arguments: Annotated[list[str] | None, typer.Argument(help=RUN_HELP, metavar=RUN_METAVAR)] = None,
    target: Annotated[Target | None, typer.Option(help="In place of cluster.target.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Render the files, start nothing.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the rendered files and plan.json to this directory.")
    ] = None,
) -> None:
    """Start a run where its `cluster` section says: this machine, Slurm, or Kubernetes.

    The stages fetch, prepare, preflight and train follow each other, each when the one before it has succeeded. Rendered
    files are the same bytes for the same spec, and need neither network nor GPU.
    """
    from argosy.launch.placement import place
    from argosy.launch.render import render, write

    path, overrides = run_and_overrides(arguments)
    placed = place(require_run(path), overrides, target)
    files = render(placed)
    if output is not None:
        write(files, output)
        print("\n".join(str(output / name) for name in files))
    elif dry_run:
        print("\n".join(f"# {name}\n{text}" for name, text in files.items()))

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


class StageName(StrEnum):
    fetch = "fetch"
    prepare = "prepare"
    preflight = "preflight"
    train = "train"


def launch(
    arguments: Annotated[list[str] | None, typer.Argument(help=RUN_HELP, metavar=RUN_METAVAR)] = None,
    target: Annotated[Target | None, typer.Option(help="In place of cluster.target.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Render the files, start nothing.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the rendered files and plan.json to this directory.")
    ] = None,
    oversized: Annotated[
        bool, typer.Option("--oversized", help="Although the planner says that it does not fit into the GPUs' memory.")
    ] = False,
    stage: Annotated[StageName | None, typer.Option(help="Only this one.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the last stage is started, rather than when it ends.")
    ] = False,
    in_cluster: Annotated[
        bool, typer.Option("--in-cluster", help="From inside a pod, by its service account: the chart's conductor.")
    ] = False,
) -> None:
    """Start a run where its `cluster` section says: this machine, Slurm, or Kubernetes.

    The stages fetch, prepare, preflight and train follow each other, each when the one before it has succeeded; one that
    fails ends the chain with its reason and exit code 3. Interrupted, the same command goes on: what runs is followed, what is done stays
    done. Rendered files are the same bytes for the same spec, and need neither network nor GPU.
    """
    from argosy.launch.placement import place
    from argosy.launch.render import render, write

    path, overrides = run_and_overrides(arguments)
    path = require_run(path)
    placed = place(path, overrides, target, oversized=oversized)
    if dry_run or output is not None:
        files = render(placed)
    if output is not None:
        write(files, output)
        print("\n".join(str(output / name) for name in files))
    if dry_run:
        print("" if output is not None else "\n".join(f"# {name}\n{text}" for name, text in files.items()), end="")
        return
    from argosy.launch.start import start

    code = start(
        placed, path, stage=stage.value if stage else None, follow=not detach, in_cluster=in_cluster, output=output,
        say=lambda text: print(text, flush=True),
    )  # fmt: skip
    raise typer.Exit(code)

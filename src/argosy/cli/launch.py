"""argosy launch"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.arguments import RUN_HELP, RUN_METAVAR, require_run, run_and_overrides
from argosy.config.targets import TARGETS

if TYPE_CHECKING:
    TargetChoice = str
else:
    TargetChoice = StrEnum("TargetChoice", {name: name for name in TARGETS})


def launch(
    arguments: Annotated[list[str] | None, typer.Argument(help=RUN_HELP, metavar=RUN_METAVAR)] = None,
    target: Annotated[TargetChoice | None, typer.Option(help="In place of cluster.target.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Render the files, start nothing.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the rendered files and plan.json to this directory.")
    ] = None,
    oversized: Annotated[
        bool, typer.Option("--oversized", help="Although the planner says that it does not fit into the GPUs' memory.")
    ] = False,
    stage: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this one: storage, fetch, prepare, preflight or train.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the last stage is started, rather than when it ends.")
    ] = False,
    in_cluster: Annotated[
        bool, typer.Option("--in-cluster", help="From inside a pod, by its service account: the chart's conductor.")
    ] = False,
) -> None:
    """Start a run here, on Slurm or on Kubernetes (`cluster`).

    The stages fetch, prepare, preflight and train follow each other, each when the one before it has succeeded; one that
    fails or is stopped ends the chain with its reason and exit code 3. Interrupted, the same command goes on: what runs is followed, what is done stays
    done. Rendered files are the same bytes for the same spec, and need neither network nor GPU.
    """
    from argosy.launch.place import place
    from argosy.launch.render import render, write
    from argosy.launch.runs import chosen_stage, start
    from argosy.launch.target import LaunchOptions

    path, overrides = run_and_overrides(arguments)
    path = require_run(path, "launch")
    placed = place(path, overrides, target, oversized=oversized)
    if dry_run or output is not None:
        files = render(placed)
    if output is not None:
        write(files, output)
        print("\n".join(str(output / name) for name in files))
    if dry_run:
        print("" if output is not None else "\n".join(f"# {name}\n{text}" for name, text in files.items()), end="")
        return
    options = LaunchOptions(
        path,
        only=chosen_stage(placed, stage),
        follow=not detach,
        in_cluster=in_cluster,
        output=output,
        say=lambda text: print(text, flush=True),
    )
    raise typer.Exit(start(placed, options))

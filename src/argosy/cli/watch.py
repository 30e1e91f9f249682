"""The `argosy watch` and `argosy report` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUN = Annotated[
    str,
    typer.Argument(
        help="A run directory, such as runs/demo; or the run spec, or with -n the name, of a run in a cluster.",
        metavar="RUN",
    ),
]
NAMESPACE = Annotated[
    str | None,
    typer.Option("-n", "--namespace", help="Read the run in this Kubernetes namespace, through the API server."),
]


def watch(
    run: RUN,
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
    namespace: NAMESPACE = None,
) -> None:
    """Watch a run in the terminal.

    Shows curves, rates, where its time goes, ranks, events and alerts. Redraws every second on a terminal; elsewhere it prints a line for each
    logged step and event, and exits when the run ends. It reads the run directory only, from any machine that can see it, or in a cluster
    through a small pod that reads the volume.
    """
    from argosy.launch.run_directory import run_directory
    from argosy.watch.live import watch as look

    with run_directory(run, namespace) as directory:
        look(directory, once=once)


def report(
    run: RUN,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="The file to write; default: RUN/report.html, or NAME-report.html of a run in a cluster.",
        ),
    ] = None,
    namespace: NAMESPACE = None,
) -> None:
    """Write a report of a run, one HTML file.

    It has curves, facts, where the time went, incidents and the config. The report is one HTML file without external resources or scripts; a browser can print it to PDF.
    """
    from argosy.files import replace_file
    from argosy.launch.run_directory import in_cluster, run_directory
    from argosy.watch.run_list import Run, require_run
    from argosy.watch.run_report import page

    with run_directory(run, namespace) as directory:
        found = require_run(directory)
        name = directory.resolve().name
        kept = Path(f"{name}-report.html") if in_cluster(run, namespace) else found.root / "report.html"
        one = Run(name, directory)
        one.listen()
        replace_file(output or kept, page(one).encode())
    print(output or kept)

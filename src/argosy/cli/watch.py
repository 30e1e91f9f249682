"""The `argosy watch` and `argosy report` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUN = Annotated[Path, typer.Argument(help="A run directory, such as runs/demo.", metavar="RUN")]


def watch(
    run: RUN,
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
) -> None:
    """Watch a run in the terminal.

    Shows curves, rates, where its time goes, ranks, events and alerts. Redraws every second on a terminal; elsewhere it prints a line for each logged step and event, and exits when the run ends. It
    reads the run directory only, from any machine that can see it.
    """
    from argosy.watch.live import watch as look

    look(run, once=once)


def report(
    run: RUN,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write; default: RUN/report.html.")
    ] = None,
) -> None:
    """Write a report of a run, one HTML file.

    It has curves, facts, where the time went, incidents and the config. The report is one HTML file without external resources or scripts; a browser can print it to PDF.
    """
    from argosy.files import replace_file
    from argosy.watch.run_list import Run, require_run
    from argosy.watch.run_report import page

    found = require_run(run)
    target = output or found.root / "report.html"
    one = Run(run.resolve().name, run)
    one.listen()
    replace_file(target, page(one).encode())
    print(target)

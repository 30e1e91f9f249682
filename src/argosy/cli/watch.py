"""argosy watch and argosy report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUN = Annotated[Path, typer.Argument(help="A run directory, as runs/demo.", metavar="RUN")]


def watch(
    run: RUN,
    once: Annotated[bool, typer.Option("--once", help="Show what there is, and leave.")] = False,
) -> None:
    """Watch a run: curves, rates, where its time goes, ranks, events and alerts.

    Redraws every second on a terminal; elsewhere it prints a line for each logged step and event, and leaves when the run ends. It
    reads the run directory only, from any machine that sees it.
    """
    from argosy.watch.live import watch as look

    look(run, once=once)


def report(
    run: RUN,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write; default: RUN/report.html.")
    ] = None,
) -> None:
    """Write a run on one page: curves, facts, where its time went, incidents, config.

    One HTML file that loads nothing from elsewhere and runs no scripts; a browser prints it to PDF.
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

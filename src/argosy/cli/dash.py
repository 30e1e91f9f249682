"""The `argosy dash` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dash(
    root: Annotated[Path, typer.Argument(help="The directory your runs are in, or one run.", metavar="[ROOT]")] = Path(
        "runs"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any that is free.")] = 8265,
    token: Annotated[
        str | None, typer.Option(envvar="ARGOSY_DASH_TOKEN", help="The access token; default: a new one each time.")
    ] = None,
) -> None:
    """Serve a dashboard of runs in a browser.

    It shows curves, goodput, ranks, checkpoints, events, a comparison of configs, and the planner.

    Listens on this machine only, and prints the link with its token. It only reads run directories, so it works on a shared
    file system, while a run trains and after it has died.
    """
    from argosy.watch.dashboard import serve

    serve(root, port=port, token=token)

"""The `argosy dash` command."""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.watch import NAMESPACE


def dash(
    root: Annotated[
        str,
        typer.Argument(
            help="The directory your runs are in, or one run; or the run spec, or with -n the name, of a run in a cluster.",
            metavar="[ROOT]",
        ),
    ] = "runs",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any that is free.")] = 8265,
    token: Annotated[
        str | None, typer.Option(envvar="ARGOSY_DASH_TOKEN", help="The access token; default: a new one each time.")
    ] = None,
    namespace: NAMESPACE = None,
) -> None:
    """Serve a dashboard of runs in a browser.

    It shows curves, a table of hyper-parameters and results, samples, goodput, ranks, checkpoints, events, logs, and the planner.

    Listens on this machine only, and prints the link with its token. It reads run directories, so it works on a shared
    file system, while a run trains and after it has died; all it writes is notes.json, the tags and the note of a run. Of a run in
    a cluster it shows all runs on the volume, through a small pod that reads it.
    """
    from argosy.launch.run_directory import in_cluster, run_directory
    from argosy.watch.dashboard import serve

    with run_directory(root, namespace, all_runs=True) as directory:
        serve(directory, port=port, token=token, copied=in_cluster(root, namespace))

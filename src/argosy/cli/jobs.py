"""argosy status | logs | stop | ls"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.launch import TargetChoice

Run = Annotated[str, typer.Argument(help="The run spec it was launched from, or its name.", metavar="RUN.yaml|NAME")]
Namespace = Annotated[str | None, typer.Option("-n", "--namespace", help="Kubernetes namespace.")]
On = Annotated[TargetChoice | None, typer.Option("--target", help="Where it was launched, if not where its spec says.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(run: Run, namespace: Namespace = None, target: On = None, as_json: Json = False) -> None:
    """Show the state, progress and ETA of a run.

    Each stage of a launched run has its state with the reason in plain words.
    """
    import json
    from dataclasses import asdict

    from argosy.launch.runs import find
    from argosy.launch.runs import status as ask

    found = ask(find(run, namespace, target))
    if as_json:
        print(json.dumps(asdict(found)))
        return
    for stage, state in found.stages.items():
        print(f"{stage:<10} {state}")
    print(f"{'progress':<10} {found.progress or 'no step logged yet'}")


def logs(
    run: Run,
    namespace: Namespace = None,
    target: On = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as lines come.")] = False,
    rank: Annotated[int, typer.Option(min=0, help="Of this rank; on Kubernetes, of the pod that holds it.")] = 0,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last lines.")] = None,
) -> None:
    """Print the log of a run.

    It comes from the pods, where a lost connection is taken up again, or from the run directory.
    """
    from argosy.launch.runs import find
    from argosy.launch.runs import logs as lines

    for line in lines(find(run, namespace, target), rank=rank, follow=follow, tail=tail):
        print(line, flush=follow)


def stop(run: Run, namespace: Namespace = None, target: On = None) -> None:
    """Stop a launched run, which saves first.

    Data, checkpoints and volumes stay, and launching it again goes on.
    """
    from argosy.launch.runs import end, find

    for what in end(find(run, namespace, target)):
        print(f"ended {what}")
    print("it saves before it ends; launching it again goes on")


def ls(
    directory: Annotated[Path, typer.Argument(help="The directory of the runs.", metavar="[DIR]")] = Path("runs"),
    cluster: Annotated[
        bool, typer.Option("--cluster", help="List the launched runs of a Kubernetes namespace instead.")
    ] = False,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """List runs: state, step, loss, validation loss, size and age.

    Without options it lists the run directories here. With --cluster or -n it lists the launched runs of a Kubernetes namespace
    and their stages.
    """
    import json

    if not cluster and namespace is None:
        from argosy.watch.run_table import describe_runs, list_runs

        rows = list_runs(directory)
        print(json.dumps([row.as_dict() for row in rows]) if as_json else describe_runs(directory, rows))
        return
    from argosy.launch.targets.kubernetes import runs_of_namespace

    listed = runs_of_namespace(namespace)
    found = {run: {stage: state.phase for stage, state in stages.items()} for run, stages in listed.items()}
    if as_json:
        print(json.dumps(found))
        return
    for run, stages in sorted(found.items()):
        print(f"{run}  " + ", ".join(f"{stage} {phase}" for stage, phase in stages.items()))
    if not found:
        print("no runs")

"""argosy status | logs | stop | cp | ls"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.arguments import RUN_HELP, RUN_METAVAR, require_run, run_and_overrides
from argosy.cli.launch import TargetChoice
from argosy.errors import ArgosyError

if TYPE_CHECKING:
    from argosy.launch.target import Launched

Run = Annotated[
    list[str] | None,
    typer.Argument(
        help="The run spec it was launched from (default: ./run.yaml) and the same overrides; or its name.",
        metavar="[RUN.yaml|NAME] [KEY=VALUE]...",
    ),
]
Namespace = Annotated[str | None, typer.Option("-n", "--namespace", help="Kubernetes namespace.")]
On = Annotated[TargetChoice | None, typer.Option("--target", help="Where it was launched, if not where its spec says.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _find(arguments: list[str] | None, namespace: str | None, target: str | None) -> Launched:
    from argosy.launch.runs import find

    path, overrides = run_and_overrides(arguments)
    given = arguments is not None and len(arguments) > len(overrides)
    return find(arguments[0] if arguments and given else str(require_run(path)), namespace, target, overrides)


def status(run: Run = None, namespace: Namespace = None, target: On = None, as_json: Json = False) -> None:
    """Show the state, progress and ETA of a run.

    Each stage of a launched run has its state with the reason in plain words.
    """
    import json
    from dataclasses import asdict

    from argosy.launch.runs import status as ask

    found = ask(_find(run, namespace, target))
    if as_json:
        print(json.dumps(asdict(found)))
        return
    for stage, state in found.stages.items():
        print(f"{stage:<10} {state}")
    print(f"{'progress':<10} {found.progress or 'no step logged yet'}")


def logs(
    run: Run = None,
    namespace: Namespace = None,
    target: On = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as lines come.")] = False,
    rank: Annotated[int, typer.Option(min=0, help="Of this rank; on Kubernetes, of the pod that holds it.")] = 0,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last lines.")] = None,
) -> None:
    """Print the log of a run.

    It comes from the pods, where a lost connection is taken up again, or from the run directory.
    """
    from argosy.launch.runs import logs as lines

    for line in lines(_find(run, namespace, target), rank=rank, follow=follow, tail=tail):
        print(line, flush=follow)


def stop(run: Run = None, namespace: Namespace = None, target: On = None) -> None:
    """Stop a launched run, which saves first.

    Data, checkpoints and volumes stay, and launching it again goes on.
    """
    from argosy.launch.runs import end
    from argosy.launch.runs import status as ask

    found = _find(run, namespace, target)
    for what in end(found):
        print(f"ended {what}")
    state = next((state for state in ask(found).stages.values() if state.phase == "stopped"), None)
    print("it saves before it ends; launching it again goes on" if state is None else state)


def cp(
    source: Annotated[
        Path, typer.Argument(help="A file or a directory of this machine.", metavar="SOURCE", exists=True)
    ],
    destination: Annotated[str, typer.Argument(help="Its path on the shared volume.", metavar="DESTINATION")],
    arguments: Annotated[list[str] | None, typer.Argument(help=RUN_HELP, metavar=RUN_METAVAR)] = None,
) -> None:
    """Copy files to the volume of a run on Kubernetes.

    For example a tokenizer, texts, or a model to start from. The volume is claimed if it is not there yet. Needs kubectl.
    """
    from argosy.launch.place import place
    from argosy.launch.targets.kubernetes import connected

    path, overrides = run_and_overrides(arguments)
    placed = place(require_run(path), overrides)
    cluster = connected(placed.cluster.namespace)
    from argosy.launch.upload import upload

    upload(placed, cluster, source, destination, lambda text: print(text, flush=True))


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

        if not directory.is_dir() and directory != Path("runs"):
            raise ArgosyError("run.not-found", f"there is no directory {directory}", fix="argosy ls DIR")
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

"""The `argosy doctor` command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.arguments import on_every_rank


def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="A run directory to diagnose; or a run spec (and overrides) to check this machine for; or nothing.",
            metavar="[RUN | RUN.yaml [KEY=VALUE]...]",
        ),
    ] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(
            "--log",
            help="Another file to read: logs of ranks or pods, dmesg, kubectl get events; - for standard input; may be repeated.",
        ),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Also measure all-reduce bandwidth, with this many ranks on each node.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Diagnose a run, or check machines before one (preflight).

    With a run directory: one verdict, what to do, then the evidence. The directory is only read, so this works while the run hangs
    and after it has died.

    With a run spec, or nothing: checks GPUs, limits, shared memory, network devices, storage, host names, clock and secrets of this
    node; with --nproc on every node of the job, also all-reduce bandwidth and the transport NCCL uses. It names the faulty node, and
    the exit code is 2 if there is one.
    """
    target = (arguments or [""])[0]
    if target and not target.endswith((".yaml", ".yml")) and "=" not in target:
        _diagnose(Path(target), log or [], as_json)
    elif nproc is not None:
        raise typer.Exit(on_every_rank(nproc))
    else:
        raise typer.Exit(_preflight(arguments or [], as_json))


def _diagnose(run: Path, log: list[Path], as_json: bool) -> None:
    import json

    from argosy.errors import ArgosyError
    from argosy.watch.diagnosis import diagnose
    from argosy.watch.finding import STATES
    from argosy.watch.reading import printable
    from argosy.watch.run_list import Run, require_run

    log = [Path("/dev/stdin") if path == Path("-") else path for path in log]
    for path in log:
        if not path.exists() or path.is_dir():
            raise ArgosyError("io.failed", f"{path} is not a file", key="--log", value=path, fix="name a text file")
    require_run(run)
    one = Run(run.resolve().name, run)
    one.listen()
    found = diagnose(one, log)
    if as_json:
        print(json.dumps([finding.as_dict() for finding in found]))
        return
    first, *others = found
    print(printable(first.verdict))
    if first.fix:
        print(f"\nfix       {printable(first.fix)}")
    if first.evidence:
        print("\nevidence  " + "\n          ".join(map(printable, first.evidence)))
    also = dict.fromkeys(printable(finding.verdict) for finding in others if finding.name not in STATES)
    if also:
        print("\nalso      " + "\n          ".join(also))


def _preflight(arguments: list[str], as_json: bool) -> int:
    from argosy.launch.preflight import check_node, finish, wanted_of

    wanted = wanted_of(arguments, os.environ)
    if "ARGOSY_RANKS" not in os.environ:
        return finish(wanted, check_node(wanted), None, as_json=as_json)
    from argosy.measure.bandwidth import probe
    from argosy.supervise.rank_process import run_as_rank
    from argosy.supervise.world import find_world

    world = find_world(os.environ)
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])

    def work() -> int:
        report = [check.as_dict() for check in check_node(wanted)] if world.local_rank == 0 else []
        probed = probe(world, per_node, report)
        return finish(wanted, [], probed, as_json=as_json, rank=world.rank, local_rank=world.local_rank)

    return run_as_rank(work, world.rank)

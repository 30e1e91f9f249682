"""argosy doctor"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    run: Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")],
    log: Annotated[
        list[Path] | None,
        typer.Option("--log", help="More to read: logs of ranks or pods, dmesg, kubectl get events; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is wrong with a run: one verdict, what to do, then the evidence.

    Reads the run directory only (heart beats, events, figures, logs, saved stacks), so it works while the run hangs and after it died.
    """
    import json

    from argosy.errors import ArgosyError
    from argosy.watch.doctor import NOTE, diagnose
    from argosy.watch.runs import Run, require_run

    for path in log or []:
        if not path.is_file():
            raise ArgosyError("io.failed", f"{path} is not a file", key="--log", value=path, fix="name a text file")
    require_run(run)
    found = diagnose(Run(run.resolve().name, run), log or [])
    if as_json:
        print(json.dumps([finding.as_dict() for finding in found]))
        return
    first, *others = found
    print(first.verdict)
    if first.fix:
        print(f"\nfix       {first.fix}")
    if first.evidence:
        print("\nevidence  " + "\n          ".join(first.evidence))
    others = [finding for finding in others if finding.weight > NOTE]
    if others:
        print("\nalso      " + "\n          ".join(dict.fromkeys(finding.verdict for finding in others)))

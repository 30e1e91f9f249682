"""Checks that the checkpoints, metrics and events of a run directory belong together.

People prune, copy and restore parts of a run. A missing part of the record is safe and gives a message. Resuming from another
run's weights, or mixing two runs in one record, is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from argosy.errors import ArgosyError
from argosy.record.jsonl import read_jsonl
from argosy.record.rundir import RunDir

# Bytes read from the end of a metrics file: certainly more than one record.
_END = 1 << 20


def check_continuity(run: RunDir, steps: Sequence[int]) -> list[str]:
    """Return messages about gaps in the record, for the user to see before the run resumes.

    Args:
        steps: the steps of the checkpoints that exist, newest first.

    Raises:
        ArgosyError: the events say that checkpoints were saved, and none exists.
    """
    saved = max((e["step"] for e in _last_saves(run.events)), default=0)
    logged = last_step(run.metrics)
    if not steps:
        if saved:
            raise ArgosyError(
                "run.checkpoints-gone",
                f"{run.root} had saved step {saved} (events.jsonl), and {run.checkpoints.name}/ holds no checkpoint: starting at step 1 "
                f"would mix two runs in one record" + (f", whose metrics go to step {logged}" if logged else ""),
                key="name",
                value=run.root.name,
                fix=f"put the checkpoints back into {run.checkpoints}; or --fresh --archive to move this record aside and begin "
                "anew; or give another name=…",
            )
        return [f"steps 1 to {logged} of an earlier start were never saved, and are taken again"] if logged else []
    newest = steps[0]
    if saved > newest:
        return [
            f"warning: step {saved} was saved once, and the newest checkpoint is step {newest}: steps {newest + 1} to "
            f"{max(saved, logged)} are taken again"
        ]
    if logged < newest:
        ends = f"ends at step {logged}" if logged else "is missing or empty"
        return [
            f"warning: metrics.jsonl {ends}, and the checkpoint is of step {newest}: what was logged between is lost"
        ]
    return []


def check_owner(run: RunDir, owners: Mapping[str, str | None]) -> None:
    """Refuse checkpoints of another run. `owners` maps a checkpoint's name to the identity of the run that saved it, or None."""
    ours = run.identity
    for name, owner in owners.items():
        if ours is not None and owner is not None and owner != ours:
            raise ArgosyError(
                "run.changed",
                f"{run.checkpoints / name} was saved by another run: going on from it would mix two runs in one record",
                key="name",
                value=run.root.name,
                fix=f"move it away; to start from its weights give another name=… and init_from={run.checkpoints / name}; if this is the "
                f"run it belongs to, delete {run.resolved_file}, and the next start writes it anew",
            )


def last_step(path: Path) -> int:
    """Return the step of the last complete record of a metrics file, or 0 if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(orjson.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def _last_saves(events: Path) -> list[dict[str, int]]:
    """Return the newest save event, as a list of at most one. Earlier ones may be of steps that were rewound."""
    saves = [e for e in read_jsonl(events) if e.get("event") == "save" and isinstance(e.get("step"), int)]
    return saves[-1:]

"""`argosy ls`: the runs under a directory, newest first, one line each."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from argosy.config.counts import count_parameters
from argosy.config.model import ModelSpec
from argosy.console.formats import amount, clock, volume
from argosy.record.jsonl import read_metrics
from argosy.watch.run_list import Run, find_runs


@dataclass(frozen=True)
class RunRow:
    """One run. `bytes` are those of its checkpoints; `age_s` is the time since it last wrote something."""

    name: str
    state: str
    step: int | None
    steps: int | None
    loss: float | None
    # The lowest of the run.
    validation_loss: float | None
    parameters: int | None
    bytes: int
    age_s: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def list_runs(root: Path) -> list[RunRow]:
    """Return the runs under `root`, the newest first."""
    rows = [_row(Run(name, path)) for name, path in find_runs(root).items()]
    return sorted(rows, key=lambda row: row.age_s)


def describe_runs(root: Path, rows: list[RunRow]) -> str:
    if not rows:
        return f"no runs in {root}; `argosy train` makes one, and `argosy ls DIR` looks elsewhere"
    width = max(4, *(len(row.name) for row in rows))
    lines = [
        f"{'name':<{width}}  {'state':<8}{'step':>15}  {'loss':>8}  {'validation':>10}  {'params':>7}  {'disk':>7}  {'age':>7}"
    ]
    for row in rows:
        step = "" if row.step is None else f"{row.step}/{row.steps or '?'}"
        loss, validation = (_figure(value) for value in (row.loss, row.validation_loss))
        size = "" if row.parameters is None else amount(row.parameters)
        lines.append(
            f"{row.name:<{width}}  {row.state:<8}{step:>15}  {loss:>8}  {validation:>10}  {size:>7}  {volume(row.bytes):>7}  "
            f"{clock(row.age_s):>7}"
        )
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _row(run: Run) -> RunRow:
    records = read_metrics(run.dir.metrics)
    trained = [record for record in records.values() if record.get("loss") is not None]
    last = trained[-1] if trained else {}
    losses = [record["validation_loss"] for record in records.values() if record.get("validation_loss") is not None]
    checkpoints = run.checkpoints()
    written = max((_changed(path) for path in (run.dir.events, run.dir.metrics, run.root)), default=0.0)
    return RunRow(
        run.name,
        run.state(),
        last.get("step"),
        last.get("steps"),
        last.get("loss"),
        min(losses, default=None),
        _parameters(run),
        sum(int(one["bytes"]) for one in checkpoints),
        max(0.0, time.time() - written),
    )


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _parameters(run: Run) -> int | None:
    try:
        return count_parameters(ModelSpec.model_validate(run.spec().get("model"))).total
    except ValidationError:
        return None

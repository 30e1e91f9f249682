"""The data of a chart as CSV: every log between two values of the x axis, not the pieces that are drawn."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from argosy.watch.run_list import Run


def curve_csv(
    runs: Iterable[Run], metrics: Sequence[str], *, axis: str, first: float | None, last: float | None
) -> str:
    """Return one line for each run and log that has one of the metrics."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["run", "step", "tokens", "seconds", *map(_text, metrics)])
    for run in runs:
        for step, tokens, seconds, values in run.series.points(metrics, axis=axis, first=first, last=last):
            lines.writerow([_text(run.name), step, _whole(tokens), *map(_cell, (round(seconds, 3), *values))])
    return text.getvalue()


def _text(name: str) -> str:
    """Return a name that no spreadsheet takes for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


def _whole(value: float) -> Any:
    return "" if math.isnan(value) else int(value)


def _cell(value: float) -> Any:
    return "" if math.isnan(value) else value

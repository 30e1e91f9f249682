"""The metrics of a run in memory, by column, updated as metrics.jsonl grows.

Reading a run of a million logged steps takes some seconds, once, in a thread; what has been read so far is available at any
time. A curve is reduced to the number of pieces that the caller asks for: lowest, highest and mean value of each. Its x axis is
the step, the tokens so far, or the seconds since the run began.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.record.jsonl import Record
from argosy.record.sinks.sink import numbers
from argosy.watch.following import FollowedFile
from argosy.watch.reading import valid_metrics

# Records in a batch.
_AT_ONCE = 1000
# A stranger's file with many metric names must not fill the memory.
_MOST_COLUMNS = 256
# Larger values are left out of a curve.
_LARGEST = 1e38
Floats = NDArray[np.float32]
# What an x axis can show.
AXES = ("step", "tokens", "time")


class Series(FollowedFile):
    """The metrics of one metrics.jsonl. `update` reads new records; everything else answers from memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _AT_ONCE)
        self._clear()

    def _clear(self) -> None:
        self.count, self.version = 0, 0
        self._steps: NDArray[np.int64] = np.empty(1024, np.int64)
        self._columns: dict[str, Floats] = {}
        # Tokens and wall-clock seconds of each row. 32 bits would round them to thousands of tokens and to minutes.
        self._exact = {name: np.empty(1024, np.float64) for name in ("tokens", "time")}
        self._last: Record = {}
        # Wall-clock seconds when the run was first started, as far as its records say.
        self.began: float | None = None

    def _take(self, records: list[Record]) -> None:
        self._add(records)
        self.version += 1

    @property
    def size_read(self) -> int:
        return self._tail.offset

    @property
    def last(self) -> Record:
        """The newest record, without unusable fields."""
        return valid_metrics(self._last)

    def names(self) -> list[str]:
        return sorted(self._columns)

    def _add(self, records: Iterable[Record]) -> None:
        """Add records in file order. Runs of growing steps, nearly all records, are added column by column."""
        batch: list[Record] = []
        for record in records:
            step = record.get("step")
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
                continue
            newest = batch[-1] if batch else self._last
            if newest and step == newest["step"] and not ("loss" in record and "loss" in newest):
                # The record of a step's validation loss follows that of its training loss.
                if not batch:
                    self.count -= 1
                    batch.append({})
                batch[-1] = newest | record
                continue
            # The run went back to a checkpoint: later records are no longer valid.
            if newest and step <= newest["step"]:
                self._append(batch)
                batch = []
                self.count = int(np.searchsorted(self._steps[: self.count], step))
            if not self.count and not batch:
                self.began = _start_of(record)
            batch.append(record)
        self._append(batch)

    def _append(self, batch: list[Record]) -> None:
        if not batch:
            return
        first, last = self.count, self.count + len(batch)
        self._make_room(last)
        self._steps[first:last] = [record["step"] for record in batch]
        rows = [numbers(record) for record in batch]
        for name in dict.fromkeys(name for row in rows for name in row):
            self._column(name)
        for name, column in self._columns.items():
            values = np.array([row.get(name, np.nan) for row in rows], np.float64)
            column[first:last] = np.where(np.abs(values) < _LARGEST, values, np.nan)
        for name, exact in self._exact.items():
            exact[first:last] = [_number(record.get(name)) for record in batch]
        self.count, self._last = last, batch[-1]

    def _make_room(self, rows: int) -> None:
        while rows > len(self._steps):
            self._steps = np.concatenate([self._steps, np.empty_like(self._steps)])
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, np.empty_like(column)])
            for name, exact in self._exact.items():
                self._exact[name] = np.concatenate([exact, np.empty_like(exact)])

    def _column(self, name: str) -> None:
        if name not in self._columns and len(self._columns) < _MOST_COLUMNS:
            self._columns[name] = np.full(len(self._steps), np.nan, np.float32)

    def latest(self, name: str, count: int) -> list[tuple[int, float]]:
        """Return (step, value) of the newest logs that have the metric."""
        with self._lock:
            if name not in self._columns:
                return []
            column = self._columns[name][: self.count]
            there = np.flatnonzero(~np.isnan(column))[-count:]
            return [(int(self._steps[i]), float(column[i])) for i in there]

    def lowest(self, name: str) -> float | None:
        """Return the lowest value of a metric, or None if it was never logged."""
        with self._lock:
            column = self._columns[name][: self.count] if name in self._columns else np.empty(0, np.float32)
            column = column[~np.isnan(column)]
            return _plain(column.min()) if len(column) else None

    def curves(
        self,
        names: Sequence[str],
        *,
        axis: str = "step",
        first: float | None = None,
        last: float | None = None,
        pieces: int = 600,
    ) -> dict[str, dict[str, list[Any]]]:
        """Return each curve between two values of the x axis, in at most `pieces` pieces.

        Returns:
            For each metric: `x` on the axis, the `step`, and the `mean`, `low` and `high` value of each piece.
        """
        with self._lock:
            x = self._axis(axis)
            # One point beyond each edge, so that the line leaves the picture.
            rows = self._rows(x, first, last, beyond=1)
            columns = {name: self._columns[name][rows].copy() for name in names if name in self._columns}
            steps, x = self._steps[rows].copy(), x[rows].copy()
        return {name: _pieces(steps, x, column, pieces) for name, column in columns.items()}

    def points(
        self, names: Sequence[str], *, axis: str = "step", first: float | None = None, last: float | None = None
    ) -> Iterator[tuple[int, float, float, list[float]]]:
        """Yield step, tokens, seconds since the start and the metrics of each log that has one of them. Unknown numbers are NaN."""
        with self._lock:
            rows = self._rows(self._axis(axis), first, last, beyond=0)
            tokens, seconds = (self._axis(name)[rows].copy() for name in ("tokens", "time"))
            none = np.full(len(tokens), np.nan, np.float32)
            columns = [self._columns[name][rows].copy() if name in self._columns else none for name in names]
            steps = self._steps[rows].copy()
        for i, step in enumerate(steps):
            values = [_plain(column[i]) for column in columns]
            if not all(map(math.isnan, values)):
                yield int(step), float(tokens[i]), float(seconds[i]), values

    def _axis(self, name: str) -> NDArray[np.float64]:
        """Return the value of every row on an axis, never falling. What a row does not say is interpolated between steps."""
        if name not in AXES:
            raise ValueError(f"an x axis is one of {', '.join(AXES)}")
        steps = self._steps[: self.count].astype(np.float64)
        if name == "step":
            return steps
        values = self._exact[name][: self.count]
        known = ~np.isnan(values)
        if not known.any():
            return np.full(self.count, np.nan)
        whole = values if known.all() else np.interp(steps, steps[known], values[known])
        # The clock of the machine that resumed a run may be behind.
        rising: NDArray[np.float64] = np.maximum.accumulate(whole - (self.began or 0.0) if name == "time" else whole)
        return rising

    def _rows(self, x: NDArray[np.float64], first: float | None, last: float | None, *, beyond: int) -> slice:
        low = 0 if first is None else int(np.searchsorted(x, first))
        high = self.count if last is None else int(np.searchsorted(x, last, side="right"))
        return slice(max(0, low - beyond), min(self.count, high + beyond))


def _pieces(steps: NDArray[np.int64], x: NDArray[np.float64], values: Floats, count: int) -> dict[str, list[Any]]:
    there = ~np.isnan(values) & ~np.isnan(x)
    steps, x, values = steps[there], x[there], values[there]
    if len(values) <= 2 * count:
        whole = [_plain(v) for v in values]
        return {"step": steps.tolist(), "x": x.tolist(), "mean": whole, "low": whole, "high": whole}
    edges = np.linspace(0, len(values), count + 1).astype(np.int64)[:-1]
    sizes = np.diff(np.append(edges, len(values)))
    middles = edges + sizes // 2
    return {
        "step": steps[middles].tolist(),
        "x": x[middles].tolist(),
        "mean": [_plain(v) for v in np.add.reduceat(values.astype(np.float64), edges) / sizes],
        "low": [_plain(v) for v in np.minimum.reduceat(values, edges)],
        "high": [_plain(v) for v in np.maximum.reduceat(values, edges)],
    }


def _start_of(first: Record) -> float | None:
    """Return the wall-clock time when the run was started: the time of its first record less all that was spent before it."""
    record = valid_metrics(first)
    return None if record.get("time") is None else float(record["time"]) - sum((record.get("spent") or {}).values())


def _plain(value: Any) -> float:
    return float(f"{float(value):.7g}")


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < _LARGEST else math.nan

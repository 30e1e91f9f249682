"""The metrics of a run in memory, by column, updated as metrics.jsonl grows.

Reading a run of a million logged steps takes some seconds, once, in a thread; what has been read so far is available at any
time. A curve is reduced to the number of pieces that the caller asks for: lowest, highest and mean value of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class Series(FollowedFile):
    """The metrics of one metrics.jsonl. `update` reads new records; everything else answers from memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _AT_ONCE)
        self._clear()

    def _clear(self) -> None:
        self.count, self.version = 0, 0
        self._steps: NDArray[np.int64] = np.empty(1024, np.int64)
        self._columns: dict[str, Floats] = {}
        self._last: Record = {}
        self.first_time: float | None = None

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
            if self.first_time is None and isinstance(record.get("time"), int | float):
                self.first_time = float(record["time"])
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
        self.count, self._last = last, batch[-1]

    def _make_room(self, rows: int) -> None:
        while rows > len(self._steps):
            self._steps = np.concatenate([self._steps, np.empty_like(self._steps)])
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, np.empty_like(column)])

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

    def curves(
        self, names: Sequence[str], *, first: float | None = None, last: float | None = None, pieces: int = 600
    ) -> dict[str, dict[str, list[Any]]]:
        """Return each curve between two steps, in at most `pieces` pieces."""
        with self._lock:
            steps = self._steps[: self.count]
            low = 0 if first is None else int(np.searchsorted(steps, first))
            high = self.count if last is None else int(np.searchsorted(steps, last, side="right"))
            # One point beyond each edge, so that the line leaves the picture.
            low, high = max(0, low - 1), min(self.count, high + 1)
            rows = {name: self._columns[name][low:high].copy() for name in names if name in self._columns}
            steps = steps[low:high].copy()
        return {name: _pieces(steps, column, pieces) for name, column in rows.items()}


def _pieces(steps: NDArray[np.int64], values: Floats, count: int) -> dict[str, list[Any]]:
    there = ~np.isnan(values)
    steps, values = steps[there], values[there]
    if len(values) <= 2 * count:
        whole = [_plain(v) for v in values]
        return {"step": steps.tolist(), "mean": whole, "low": whole, "high": whole}
    edges = np.linspace(0, len(values), count + 1).astype(np.int64)[:-1]
    sizes = np.diff(np.append(edges, len(values)))
    return {
        "step": steps[edges + sizes // 2].tolist(),
        "mean": [_plain(v) for v in np.add.reduceat(values.astype(np.float64), edges) / sizes],
        "low": [_plain(v) for v in np.minimum.reduceat(values, edges)],
        "high": [_plain(v) for v in np.maximum.reduceat(values, edges)],
    }


def _plain(value: Any) -> float:
    return float(f"{float(value):.7g}")

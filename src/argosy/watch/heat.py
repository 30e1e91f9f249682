"""The heat map of ranks over time, of bounded size: ranks down, steps across, the worst value in each cell.

It is updated as `ranks.jsonl` grows, and parses each line once, so that neither many ranks nor a long run delays a page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.record.jsonl import Record
from argosy.record.rank_columns import COLUMNS, Ranks
from argosy.watch.following import FollowedFile

# A rank's own work divided by its peers'.
RATIO = "ratio"
# Most rows, and fewest columns of a long run.
_ROWS, _CELLS = 256, 240
# Lines in a batch.
_AT_ONCE = 50
Row = NDArray[np.float32]


class HeatMap(FollowedFile):
    """The heat map of one ranks.jsonl. `update` reads new lines; `picture` answers from memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _AT_ONCE)
        self._clear(0)

    def _clear(self, world: int) -> None:
        self._world, self._stride, self._in_last = world, 1, 0
        # Step of the first line in each column of cells.
        self._steps: list[int] = []
        self._cells: dict[str, list[Row]] = {}

    def _take(self, records: list[Record]) -> None:
        for line in filter(None, map(Ranks.read, records)):
            self._add(line)

    def picture(self, column: str = RATIO) -> dict[str, Any]:
        high = -(-self._world // _ROWS) or 1
        with self._lock:
            cells, steps = list(self._cells.get(column, ())), list(self._steps)
            names = [name for name in (RATIO, *COLUMNS) if name in self._cells]
        # Missing values are NaN.
        plain = np.round(np.stack(cells).astype(np.float64), 4).tolist() if cells else []
        ranks = list(range(0, self._world, high))
        return {"steps": steps, "ranks": ranks, "cells": plain, "ranks_a_row": high, "column": column, "columns": names}

    def _add(self, line: Ranks) -> None:
        world = len(line.columns["own_s"])
        # Another world size: the ranks are not the same.
        if world != self._world:
            self._clear(world)
        # The run went back to a checkpoint.
        while self._steps and self._steps[-1] >= line.step:
            self._steps.pop()
            for rows in self._cells.values():
                rows.pop()
            self._in_last = self._stride
        fresh = not self._steps or self._in_last >= self._stride
        if fresh:
            self._steps.append(line.step)
            self._in_last = 0
        self._in_last += 1
        for name in (RATIO, *COLUMNS):
            values = line.ratios() if name == RATIO else line.columns.get(name)
            if values is None and name not in self._cells:
                continue
            rows = self._cells.setdefault(name, [self._nothing()] * (len(self._steps) - fresh))
            row = self._nothing() if values is None else self._worst(values)
            if fresh:
                rows.append(row)
            else:
                rows[-1] = np.fmax(rows[-1], row)
        if len(self._steps) >= 2 * _CELLS and self._in_last == self._stride:
            self._halve()

    def _nothing(self) -> Row:
        return np.full(-(-self._world // (-(-self._world // _ROWS) or 1)), np.nan, np.float32)

    def _worst(self, values: list[float]) -> Row:
        row = np.array([np.nan if value is None else value for value in values], np.float32)[: self._world]
        row = np.append(row, np.full(self._world - len(row), np.nan, np.float32))
        return np.fmax.reduceat(row, np.arange(0, self._world, -(-self._world // _ROWS) or 1))

    def _halve(self) -> None:
        self._steps = self._steps[::2]
        for name, rows in self._cells.items():
            self._cells[name] = [np.fmax(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
        self._stride *= 2
        self._in_last = self._stride

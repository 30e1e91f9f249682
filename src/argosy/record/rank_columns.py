"""What each rank did between two logs, as one line of `ranks.jsonl`: a column of figures for each of `COLUMNS`.

Ranks that exchange gradients all end a step together; what tells them apart is their own work, without the time they wait
for each other. Ranks of one pipeline stage do the same work and are compared; stages differ by design.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from argosy.record.jsonl import Record

# own_s: seconds a step of the rank's own work (data wait, forward, backward, optimiser), without waiting for others.
COLUMNS = ("own_s", "data_s", "memory_gib", "utilisation", "temperature", "power_w", "throttled")


@dataclass(frozen=True)
class Ranks:
    step: int
    time: float
    columns: dict[str, list[float]]  # each of as many as there are ranks
    stages: int = 1

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], *, step: int, time: float, stages: int) -> Ranks:
        columns = {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
        return cls(step, time, {n: v for n, v in columns.items() if not all(map(math.isnan, v))}, stages)

    @classmethod
    def read(cls, record: Record) -> Ranks | None:
        """A line of the file; None where it is not one."""
        columns = {name: values for name in COLUMNS if (values := _numbers(record.get(name)))}
        step, time, stages = (
            record.get(key, default) for key, default in (("step", None), ("time", 0.0), ("stages", 1))
        )
        if not isinstance(step, int) or not isinstance(time, int | float) or not isinstance(stages, int) or stages < 1:
            return None
        return cls(step, time, columns, stages) if "own_s" in columns else None

    def line(self) -> Record:
        rounded = {name: [_rounded(v) for v in values] for name, values in self.columns.items()}
        return {"step": self.step, "time": self.time, "stages": self.stages, **rounded}

    def ratios(self) -> list[float]:
        """Each rank's own work over the usual one of the other ranks of its stage."""
        own = self.columns["own_s"]
        each = max(1, len(own) // self.stages)
        return [ratio for first in range(0, len(own), each) for ratio in _over_peers(own[first : first + each])]

    def summary(self) -> Record:
        """For the record of the step: the spread, who is slowest, and what the sensors say in all."""
        ratios = self.ratios()
        slowest = max(range(len(ratios)), key=ratios.__getitem__)
        record: Record = {}
        if len(ratios) > 1:
            record |= {"rank_spread": ratios[slowest] - 1, "slowest_rank": slowest}
        combine: dict[str, Callable[[list[float]], float]] = {
            "utilisation": statistics.fmean,
            "temperature": max,
            "power_w": math.fsum,
            "throttled": math.fsum,
        }
        for name, together in combine.items():
            values = [v for v in self.columns.get(name, []) if not math.isnan(v)]
            if values:
                record[f"gpu/{name}"] = together(values)
        return record


def _over_peers(values: Sequence[float]) -> list[float]:
    """Each over the median of the others."""
    if len(values) < 2:
        return [1.0] * len(values)
    own, others = np.array(values, np.float64), len(values) - 1
    ordered, place = np.sort(own), np.empty(len(own), np.int64)
    place[np.argsort(own, kind="stable")] = np.arange(len(own))
    low, high = (others - 1) // 2, others // 2  # the middle of the others: one further up for those at or below it
    usual = (ordered[low + (place <= low)] + ordered[high + (place <= high)]) / 2
    return list(map(float, own / np.maximum(usual, 1e-12)))


def _numbers(values: object) -> list[float]:
    """Of a line, where null is what was not a number; nothing where it is anything else."""
    if not isinstance(values, list) or not all(value is None or type(value) in (int, float) for value in values):
        return []
    return [math.nan if value is None else float(value) for value in values]


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.6g}")

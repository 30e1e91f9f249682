"""Per-rank timings and sensor readings between two logs: one line of `ranks.jsonl`, with one list for each of `COLUMNS`.

Ranks that exchange gradients finish a step at the same time. A straggler shows in `own_s`, the rank's own work without the
time it waits for other ranks. Ranks of one pipeline stage do the same work and are compared; stages differ by design.

Readings of GPUs and hosts come from `sensors.py`. Only one rank of each host has those of its host.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from argosy.record.jsonl import Record

# own_s: seconds a step of the rank's own work (data wait, forward, backward, optimiser), without waiting for other ranks.
_WORK = ("own_s", "data_s", "memory_gib")
# Each sensor's metric in the record of a step, and how the readings of all ranks become one number.
_METRICS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "utilisation": ("gpu/utilisation", statistics.fmean),
    "temperature": ("gpu/temperature", max),
    "power_w": ("gpu/power_w", math.fsum),
    "throttled": ("gpu/throttled", math.fsum),
    "device_gib": ("gpu/memory_gib", max),
    "cpu": ("host/cpu", statistics.fmean),
    "host_gib": ("host/memory_gib", max),
    "received_mb_s": ("host/received_mb_s", math.fsum),
    "sent_mb_s": ("host/sent_mb_s", math.fsum),
}
SENSED = tuple(_METRICS)
COLUMNS = (*_WORK, *SENSED)


# Ranks whose numbers are written at every log. A line has about 100 bytes for each rank.
_EVERY_LOG = 64


def line_interval_s(ranks: int) -> float:
    """Return the least seconds between two lines: with thousands of ranks, a line for every step would fill the disk."""
    return 0.0 if ranks <= _EVERY_LOG else ranks / _EVERY_LOG


@dataclass(frozen=True)
class Ranks:
    """One line of `ranks.jsonl`. Each list in `columns` has one value for each rank; `stages` counts pipeline stages."""

    step: int
    time: float
    columns: dict[str, list[float]]
    stages: int = 1

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], *, step: int, time: float, stages: int) -> Ranks:
        numbers = np.array(rows, np.float64).T
        columns = {name: v.tolist() for name, v in zip(COLUMNS, numbers, strict=True) if not np.isnan(v).all()}
        return cls(step, time, columns, stages)

    @classmethod
    def read(cls, record: Record) -> Ranks | None:
        """Parse a line of the file. Returns None if it is not valid."""
        columns = {name: values for name in COLUMNS if (values := _numbers(record.get(name)))}
        step, time, stages = (
            record.get(key, default) for key, default in (("step", None), ("time", 0.0), ("stages", 1))
        )
        if not isinstance(step, int) or not isinstance(time, int | float) or not isinstance(stages, int) or stages < 1:
            return None
        return cls(step, time, columns, stages) if "own_s" in columns else None

    def line(self) -> Record:
        """Return the record to write. Single precision keeps the lines of thousands of ranks short; NaN is written as null."""
        columns = {name: np.array(values, np.float32) for name, values in self.columns.items()}
        return {"step": self.step, "time": self.time, "stages": self.stages, **columns}

    def ratios(self) -> list[float]:
        """Return each rank's own work divided by the median of the other ranks of its pipeline stage."""
        own = self.columns["own_s"]
        each = max(1, len(own) // self.stages)
        return [ratio for first in range(0, len(own), each) for ratio in _over_peers(own[first : first + each])]

    def summary(self) -> Record:
        """Return the fields for the step's record: spread between ranks, slowest rank, combined sensor readings."""
        ratios = self.ratios()
        slowest = max(range(len(ratios)), key=ratios.__getitem__)
        record: Record = {}
        if len(ratios) > 1:
            record |= {"rank_spread": ratios[slowest] - 1, "slowest_rank": slowest}
        for name, (metric, reduce) in _METRICS.items():
            values = [v for v in self.columns.get(name, []) if not math.isnan(v)]
            if values:
                record[metric] = reduce(values)
        return record


def _over_peers(values: Sequence[float]) -> list[float]:
    """Return each value divided by the median of the others."""
    if len(values) < 2:
        return [1.0] * len(values)
    own, others = np.array(values, np.float64), len(values) - 1
    ordered, place = np.sort(own), np.empty(len(own), np.int64)
    place[np.argsort(own, kind="stable")] = np.arange(len(own))
    # Indices of the median of the others. Leaving out a value at or below an index moves that index up by one.
    low, high = (others - 1) // 2, others // 2
    medians = (ordered[low + (place <= low)] + ordered[high + (place <= high)]) / 2
    return list(map(float, own / np.maximum(medians, 1e-12)))


def _numbers(values: object) -> list[float]:
    """Return a JSON list as floats, null as NaN. Returns an empty list if `values` is anything else."""
    if not isinstance(values, list) or not all(value is None or type(value) in (int, float) for value in values):
        return []
    return [math.nan if value is None else float(value) for value in values]

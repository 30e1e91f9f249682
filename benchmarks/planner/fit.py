"""Fits the planner's constants of time to measured rows, and shows how they carry over to sources the fit has not seen.

Every constant has a prior: what data sheets, microbenchmarks and the code of the stacks lead one to expect, with how far off
that may be. The fit is the least mean absolute logarithm of predicted over measured, plus the squared distance from the
priors, so that a constant few rows speak of stays where it was expected. Constants are shared by all GPUs and stacks that
have the same part: none belongs to a source, a model or a row. A source weighs as the square root of its rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, log, sqrt
from statistics import mean

from benchmarks.planner.rows import Row

from argosy.plan.calibration import Calibration
from argosy.plan.time import step_time

# Value expected, and the spread of its logarithm.
PRIORS = {
    "product": (0.8, 0.06),  # our own measurement on an H200 is 0.79
    "power.hopper": (0.8, 0.3),
    "power.blackwell": (0.65, 0.3),
    "clock": (0.5, 0.5),  # power goes with about the square of the clock
    "narrow": (0.74, 0.1),  # measured on an H200, casts included: 0.64
    "attention.flash": (0.4, 0.25),
    "attention.native": (0.45, 0.2),  # measured on an H200
    "memory": (0.82, 0.08),  # measured on an H200 at its best: 0.91
    "passes.fused": (1.2, 0.3),
    "passes.eager": (2.2, 0.3),
    "launch.modules": (1.4e-3, 0.04),  # measured on our own engine: 163 ms for 36 layers, three passes each
    "launch.plain": (0.7e-3, 0.3),
    "launch.experts": (2.0, 0.4),
    "score_bytes": (
        12,
        0.3,
    ),  # written by the product, read and written by softmax and dropout, read by the next product
    "nvlink": (0.75, 0.12),
    "network": (0.8, 0.12),  # two p4de nodes: 78 of 94 GB/s; two p5: 487 of 600
    "latency.near": (6e-5, 0.7),
    "latency.far": (6e-5, 0.7),  # measured on p5 nodes: 65 to 75 microseconds
    "overlap": (0.6, 0.3),
    "interference": (0.3, 0.6),
    "straggle": (0.003, 0.7),
    "step": (0.005, 0.8),
}
SHARES = ("product", "narrow", "attention.flash", "attention.native", "memory", "nvlink", "network", "overlap")
MOST = 0.98  # of anything that is a share
OUTLIER = 0.7  # an error beyond this, as a logarithm, pulls no more
FIRST_STEP, LAST_STEP = 1.25, 1.005  # by which constants are multiplied and divided
PRIOR_WEIGHT = 1 / 320  # of one squared spread, against the mean error


def seconds(row: Row, known: Calibration) -> float:
    full = step_time(row.work, row.layout, row.cluster, row.stack, known).total
    if row.recomputed == 1:
        return full
    none = step_time(row.work, replace(row.layout, recompute="none"), row.cluster, row.stack, known).total
    return none + row.recomputed * (full - none)


def errors(rows: Iterable[Row], known: Calibration) -> list[float]:
    return [abs(seconds(row, known) / (row.step_s or 1.0) - 1) for row in rows]


def expected(known: Calibration) -> Calibration:
    """The priors themselves, with nothing fitted."""
    return known.model_copy(update={"constants": known.constants | {name: prior[0] for name, prior in PRIORS.items()}})


def fit(rows: Sequence[Row], known: Calibration, prior_weight: float = PRIOR_WEIGHT) -> Calibration:
    """Coordinate descent from the priors, by ever smaller steps; a constant is tried on the rows it moves."""
    of_source = Counter(row.source for row in rows)
    weights = [1 / sqrt(of_source[row.source]) for row in rows]
    share = 1 / sum(weights)

    def off(values: dict[str, float], among: Iterable[int]) -> list[float]:
        """Each row's weighted error."""
        trial = known.model_copy(update={"constants": values})
        return [
            share * weights[n] * min(OUTLIER, abs(log(seconds(rows[n], trial) / (rows[n].step_s or 1.0))))
            for n in among
        ]

    def far(name: str, value: float) -> float:
        expectation, spread = PRIORS[name]
        return prior_weight * (log(value / expectation) / spread) ** 2

    values = dict(expected(known).constants)
    everything = range(len(rows))
    step = FIRST_STEP
    while step > LAST_STEP:
        here, moved = off(values, everything), False
        for name in PRIORS:
            most = MOST if name in SHARES else float("inf")
            trials = [values | {name: min(most, values[name] * factor)} for factor in (step, 1 / step)]
            touched = everything
            for trial in trials:
                there = off(trial, touched)
                gain = sum(here[n] for n in touched) - sum(there) + far(name, values[name]) - far(name, trial[name])
                if gain > 1e-8:
                    values, moved = trial, True
                    for n, error in zip(touched, there, strict=True):
                        here[n] = error
                    break
                touched = [n for n, error in zip(touched, there, strict=True) if error != here[n]]
        if not moved:
            step = exp(log(step) / 2)
    return known.model_copy(update={"constants": {name: float(f"{value:.3g}") for name, value in values.items()}})


def folds(rows: Sequence[Row], known: Calibration, prior_weight: float = PRIOR_WEIGHT) -> None:
    """Held-out error in five folds of sources with about as many rows each; `known` was fitted to all."""
    counts = Counter(row.source for row in rows)
    parts: list[list[str]] = [[] for _ in range(5)]
    for source, _ in counts.most_common():
        min(parts, key=lambda part: sum(counts[name] for name in part)).append(source)
    print(
        "\n| held out | rows | priors alone | fitted on all | fitted on the others |\n| --- | --- | --- | --- | --- |"
    )
    table: list[tuple[list[float], ...]] = []
    for part in parts:
        left = [row for row in rows if row.source in part]
        others = fit([row for row in rows if row.source not in part], known, prior_weight)
        table.append(tuple(errors(left, constants) for constants in (expected(known), known, others)))
        print(_line(", ".join(part), table[-1]), flush=True)
    print(_line("all", tuple([error for fold in column for error in fold] for column in zip(*table, strict=True))))


def _line(name: str, columns: tuple[list[float], ...]) -> str:
    return f"| {name} | {len(columns[0])} | " + " | ".join(f"{mean(column):.1%}" for column in columns) + " |"

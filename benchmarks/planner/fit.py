"""The fit of the planner's time constants to measured rows, and its cross-validation over sources.

Every constant has a prior from data sheets, microbenchmarks and the code of the stacks, with a spread. The fit minimises the mean
absolute logarithm of predicted over measured time, plus the squared distance from the priors, so a constant that few rows depend on
stays near its prior. Constants are shared by all GPUs and stacks they apply to: none belongs to a source, a model or a row. The
weight of a source is the square root of its number of rows.
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

# Expected value, and the standard deviation of its logarithm.
PRIORS = {
    # Argosy measures 0.79 on an H200.
    "product": (0.8, 0.06),
    "power.hopper": (0.8, 0.3),
    "power.blackwell": (0.65, 0.3),
    # Power is about proportional to the square of the clock.
    "clock": (0.5, 0.5),
    # Measured on an H200, casts included: 0.64.
    "narrow": (0.74, 0.1),
    "attention.flash": (0.4, 0.25),
    # Measured on an H200.
    "attention.native": (0.45, 0.2),
    # Best measurement on an H200: 0.91.
    "memory": (0.82, 0.08),
    "passes.fused": (1.2, 0.3),
    "passes.eager": (2.2, 0.3),
    # Measured with Argosy: 163 ms for 36 layers, three passes each.
    "launch.modules": (1.4e-3, 0.04),
    "launch.plain": (0.7e-3, 0.3),
    "launch.experts": (2.0, 0.4),
    # Written by the matmul, read and written by softmax and dropout, read by the next matmul.
    "score_bytes": (12, 0.3),
    "nvlink": (0.75, 0.12),
    # Two p4de nodes: 78 of 94 GB/s; two p5: 487 of 600.
    "network": (0.8, 0.12),
    "latency.near": (6e-5, 0.7),
    # Measured on p5 nodes: 65 to 75 microseconds.
    "latency.far": (6e-5, 0.7),
    "overlap": (0.6, 0.3),
    "interference": (0.3, 0.6),
    "straggle": (0.003, 0.7),
    "step": (0.005, 0.8),
}
SHARES = ("product", "narrow", "attention.flash", "attention.native", "memory", "nvlink", "network", "overlap")
# The upper limit of constants that are shares.
MOST = 0.98
# Logarithmic errors are clipped here, so that outliers do not pull the fit.
OUTLIER = 0.7
# The factors by which coordinate descent multiplies and divides a constant.
FIRST_STEP, LAST_STEP = 1.25, 1.005
# The weight of one squared standard deviation from the prior, relative to the mean error.
PRIOR_WEIGHT = 1 / 320


def seconds(row: Row, known: Calibration) -> float:
    full = step_time(row.work, row.layout, row.cluster, row.stack, known).total
    if row.recomputed == 1:
        return full
    none = step_time(row.work, replace(row.layout, recompute="none"), row.cluster, row.stack, known).total
    return none + row.recomputed * (full - none)


def errors(rows: Iterable[Row], known: Calibration) -> list[float]:
    return [abs(seconds(row, known) / (row.step_s or 1.0) - 1) for row in rows]


def expected(known: Calibration) -> Calibration:
    """Return a calibration with the priors as constants."""
    return known.model_copy(update={"constants": known.constants | {name: prior[0] for name, prior in PRIORS.items()}})


def fit(rows: Sequence[Row], known: Calibration, prior_weight: float = PRIOR_WEIGHT) -> Calibration:
    """Fit the constants by coordinate descent from the priors, with decreasing steps.

    Only the rows whose prediction a constant changes are evaluated again.
    """
    of_source = Counter(row.source for row in rows)
    weights = [1 / sqrt(of_source[row.source]) for row in rows]
    share = 1 / sum(weights)

    def off(values: dict[str, float], among: Iterable[int]) -> list[float]:
        """Return each row's weighted error."""
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
    """Print the held-out error of five folds of sources with about as many rows each. `known` was fitted to all rows."""
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

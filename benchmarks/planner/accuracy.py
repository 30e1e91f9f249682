"""The planner's accuracy on published measurements: `python -m benchmarks.planner [CSV...] [--fit] [--folds] [--gaps]`.

For each source: rows predicted, mean and median absolute error of step time and of memory (MAPE), and the ranking of layouts: in
every group of rows that differ only in layout, Kendall's tau and the regret of the layout the planner would pick. Feasibility: rows
that ran but are predicted not to fit, and rows that ran out of memory but are predicted to fit. Rows that cannot be predicted are
listed with the reason. `--fit` fits the time constants and prints them (fit.py); `--folds` does five-fold cross-validation over
sources; `--gaps` shows the error with one column empty at a time.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, median

from benchmarks.planner.fit import PRIOR_WEIGHT, errors, fit, folds, seconds
from benchmarks.planner.gaps import MATTER
from benchmarks.planner.rows import Row, read_rows, rows_of

from argosy.plan.calibration import Calibration, calibration
from argosy.plan.memory import memory_of

HERE = Path(__file__).parent


def gibibytes(row: Row, known: Calibration) -> float:
    """Return the predicted GiB of the kind of memory the source measured.

    Allocated memory is the last rank's; reserved and device memory are those of the rank that uses most.
    """
    stages = memory_of(row.work, row.layout, row.stack, known)
    if row.memory_kind == "allocated":
        return stages[-1].allocated
    fullest = max(stages, key=lambda stage: stage.allocated)
    return fullest.device - (known.context if row.memory_kind == "reserved" else 0.0)


def fits(row: Row, known: Calibration) -> bool:
    return max(stage.device for stage in memory_of(row.work, row.layout, row.stack, known)) <= row.cluster.gpu.memory


def timed(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with a step time and a known number of GPUs."""
    return [row for row in rows if row.step_s and "gpus" not in row.filled]


def groups_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Return groups of three or more layouts of one source that differ in nothing else."""
    groups: dict[object, list[Row]] = defaultdict(list)
    for row in rows:
        model = row.work.model
        shape = (model.layers, model.hidden, model.heads, model.ffn, model.vocab_size)
        work = (row.work.seq_len, row.work.global_batch, row.work.precision)
        groups[row.source, row.stack.name, row.cluster.gpu.name, row.cluster.gpus, shape, work].append(row)
    return [group for group in groups.values() if len({str(row.layout) for row in group}) >= 3]


def ranking(group: Sequence[Row], known: Calibration) -> tuple[float, float]:
    """Return Kendall's tau of predicted and measured times, and how much slower the planner's pick ran than the best (regret)."""
    pairs = [(seconds(row, known), row.step_s or 1.0) for row in group]
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    tau = sum((sign > 0) - (sign < 0) for sign in signs) / max(1, len(signs))
    return tau, min(pairs)[1] / min(measured for _, measured in pairs) - 1


def report(rows: Sequence[Row], refused: Sequence[tuple[str, str]], known: Calibration) -> None:
    print(
        "| source | rows | timed | time MAPE | median | memory rows | MAPE | median | groups | tau | worst regret | infeasible said | OOM said to fit |"
    )
    print("| --- " * 13 + "|")
    everything = {"all": list(rows), "dense 16-bit": [r for r in rows if r.dense and r.sixteen_bit]}
    everything["dense 16-bit, without CI's tiny models"] = [
        r for r in everything["dense 16-bit"] if r.source != "golden-tiny"
    ]
    everything["MoE, fp8 and narrower"] = [r for r in rows if not (r.dense and r.sixteen_bit)]
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    everything |= {"golden 7B": [r for r in by_source["golden"] if "gpus" not in r.filled and r.dense]}
    for name, chosen in {**by_source, **everything}.items():
        if chosen:
            print(_line(name, chosen, known))
    unknown = [row.id for row in rows if row.step_s and "gpus" in row.filled]
    print(f"\ntime not scored, number of GPUs not published: {', '.join(unknown) or 'none'}")
    print(f"no step time published: {', '.join(row.id for row in rows if not row.step_s) or 'none'}")
    ran = [row for row in rows if not row.out_of_memory]
    wrong = [row.id for row in ran if not fits(row, known)]
    print(
        f"said not to fit, of {len(ran)} that ran: {', '.join(wrong) or 'none'} ({len(wrong) / max(1, len(ran)):.1%})"
    )
    filled = Counter(column for row in rows for column in row.filled)
    print(f"cells filled: {', '.join(f'{column} in {count}' for column, count in filled.most_common()) or 'none'}")
    print(f"rows that cannot be read: {', '.join(f'{name} ({why})' for name, why in refused) or 'none'}")


def _line(name: str, rows: Sequence[Row], known: Calibration) -> str:
    with_time = timed(rows)
    time = errors(with_time, known)
    weighed = [row for row in rows if row.memory]
    memory = [abs(gibibytes(row, known) / (row.memory or 1.0) - 1) for row in weighed]
    ranked = [ranking(group, known) for group in groups_of(with_time)]
    wrong = sum(not fits(row, known) and not row.out_of_memory for row in rows)
    missed = sum(fits(row, known) and row.out_of_memory for row in rows)
    tau = f"{mean(t for t, _ in ranked):.2f}" if ranked else ""
    regret = f"{max(r for _, r in ranked):.1%}" if ranked else ""
    cells = [name, len(rows), len(time), _share(time, mean), _share(time, median), len(memory), _share(memory, mean)]
    cells += [_share(memory, median), len(ranked), tau, regret, wrong, missed]
    return "| " + " | ".join(map(str, cells)) + " |"


def _share(values: Sequence[float], of: object) -> str:
    return f"{of(values):.1%}" if values else ""  # type: ignore[operator]


def gaps(paths: Sequence[Path], known: Calibration) -> None:
    """Print the errors with one column empty in every row, which shows how well gaps are filled."""
    cells = [row for path in paths for row in csv.DictReader(path.open(newline=""))]
    print("\n| column emptied | rows that cannot be read | time MAPE | said not to fit |\n| --- | --- | --- | --- |")
    for column in ("", *MATTER):
        rows, refused = rows_of({**row, column: ""} if column else row for row in cells)
        wrong = sum(not fits(row, known) and not row.out_of_memory for row in rows)
        print(f"| {column or 'none'} | {len(refused)} | {_share(errors(timed(rows), known), mean)} | {wrong} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", nargs="*", type=Path, default=[HERE / "published.csv", HERE / "own.csv"])
    parser.add_argument("--fit", action="store_true", help="fit the time constants to the rows, and print them")
    parser.add_argument("--folds", action="store_true", help="cross-validate: show the error on held-out sources")
    parser.add_argument("--prior-weight", type=float, default=PRIOR_WEIGHT, help="weight of the priors in the fit")
    parser.add_argument("--gaps", action="store_true", help="show the error with each column empty")
    asked = parser.parse_args()
    rows: list[Row] = []
    refused: list[tuple[str, str]] = []
    for path in asked.csv:
        try:
            more, bad = read_rows(path)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            parser.error(f"{path} cannot be read: {error}")
        rows, refused = rows + more, refused + bad
    if not rows and not refused:
        parser.error(f"no rows in {', '.join(map(str, asked.csv))}")
    known = calibration()
    if asked.fit:
        known = fit(timed(rows), known, asked.prior_weight)
        print("\n".join(f"  {name}: {value:g}" for name, value in known.constants.items()))
    report(rows, refused, known)
    if asked.gaps:
        gaps(asked.csv, known)
    if asked.folds:
        folds(timed(rows), known, asked.prior_weight)

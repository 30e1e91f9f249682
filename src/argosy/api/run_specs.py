"""Run specs, plans and metrics from Python. Nothing in this module imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.config.resolve import Resolved, resolve
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.plan.advise import Question, answer
from argosy.plan.layouts import parallel_keys
from argosy.record.jsonl import read_metrics as read_records
from argosy.record.rundir import RunDir

Source = str | Path | Mapping[str, Any]


def resolve_run(run: Source, overrides: Mapping[str, Any] | None = None) -> RunSpec:
    """Resolve a run spec: read it, fill in presets and defaults, and check it.

    Args:
        run: the path of a run.yaml, or the same keys as a dict.
        overrides: changed keys in dotted form, as `{"train.steps": 100}`. A value is taken as it is, a string too:
            `"1e3"` is text, not a number.

    Raises:
        ArgosyError: the spec is wrong; its text says which key, why, and what to do.
    """
    return resolved(run, overrides).spec


def resolved(run: Source, overrides: Mapping[str, Any] | None = None) -> Resolved:
    """Resolve a run spec and keep the origin of every value."""
    return resolve(Path(run) if isinstance(run, str) else run, list((overrides or {}).items()))


@dataclass(frozen=True)
class PlannedLayout:
    """A layout of a run on a cluster, with the planner's prediction."""

    # Keys of the run spec's `parallel` section.
    parallel: dict[str, object]
    step_s: float
    tokens_per_s_gpu: float
    mfu: float
    # GiB on the fullest GPU, and GiB that a GPU has.
    memory_gib: float
    card_gib: float
    fits: bool
    # Days and US dollars of the whole run; None where its length or the price is unknown.
    days: float | None
    dollars: float | None
    warnings: list[str]


@dataclass(frozen=True)
class Plan:
    """The planner's answer: layouts that fit, the fastest first, and the spec's own layout where it has one."""

    cluster: str
    gpus: int
    layouts: Sequence[PlannedLayout]
    own: PlannedLayout | None

    @property
    def best(self) -> PlannedLayout:
        """The fastest layout that fits."""
        return self.layouts[0]


def plan_run(
    run: Source,
    overrides: Mapping[str, Any] | None = None,
    *,
    cluster: str | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    tokens: str | None = None,
    precision: str | None = None,
    top: int = 8,
) -> Plan:
    """Predict memory, time and cost of a run on a cluster, and find the layouts that suit it. No GPU is needed.

    Args:
        run: the path of a run.yaml, the same keys as a dict, or the name of a preset, as "llama3-8b".
        overrides: changed keys: of the spec in dotted form, or of the preset's model, as `{"layers": 4}`.
        cluster: nodes and their type, as "2xp4d.24xlarge", or GPUs, as "16xH100". Default: the spec's, or one H100.
        global_batch: samples in a step. Default: the spec's, or about a million tokens.
        seq_len: tokens in a sample. Default: the spec's, or the model's longest.
        tokens: length of the whole run, as "20B", for days and dollars.
        precision: "bf16", "fp16" or "fp8".
        top: number of layouts in the answer.
    """
    question = Question.read(
        str(run) if isinstance(run, Path) else run, list((overrides or {}).items()), cluster=cluster, global_batch=global_batch, seq_len=seq_len, tokens=tokens,
        precision=precision, what_if=None, price=None, hardware=None,
    )  # fmt: skip
    advice = answer(question, top=top)
    figures = advice.as_dict()
    layouts = [
        _planned(facts, parallel_keys(one.layout)) for facts, one in zip(figures["plans"], advice.shown, strict=True)
    ]
    own = None if advice.asked is None else _planned(figures["asked"], parallel_keys(advice.asked.layout))
    return Plan(question.cluster.name, question.cluster.gpus, layouts, own)


def _planned(facts: Mapping[str, Any], parallel: dict[str, object]) -> PlannedLayout:
    return PlannedLayout(
        parallel=parallel,
        step_s=facts["step_s"],
        tokens_per_s_gpu=facts["tokens_per_s_gpu"],
        mfu=facts["mfu"],
        memory_gib=max(stage["device"] for stage in facts["memory_gib"]),
        card_gib=facts["card_gib"],
        fits=facts["fits"],
        days=facts["days"],
        dollars=facts["dollars"],
        warnings=facts["warnings"],
    )


class Metrics(Mapping[str, NDArray[Any]]):
    """The metrics of a run as arrays of equal length, by name: `metrics["loss"]` beside `metrics["step"]`.

    A step that has no value of a metric has NaN there, as most steps have for `validation_loss`.
    """

    def __init__(self, columns: Mapping[str, NDArray[Any]]) -> None:
        self._columns = dict(columns)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def at_values(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the steps that have a value of this metric, and the values."""
        column = self._columns[name].astype(np.float64)
        known = ~np.isnan(column)
        return self._columns["step"][known], column[known]

    def __repr__(self) -> str:
        return f"Metrics({len(self._columns['step'])} steps: {', '.join(self._columns)})"


def read_metrics(run: str | Path) -> Metrics:
    """Read what a run logged, one row for each logged step, also while it trains.

    A resumed run logs some steps again; the rows of the attempt that died are left out.
    """
    root = Path(run)
    path = RunDir(root).metrics
    if not path.exists():
        raise ArgosyError(
            "run.not-found", f"{root} has no metrics", value=str(root), fix="give a run directory, as runs/<name>"
        )
    records = list(read_records(path).values())
    names = dict.fromkeys(name for one in records for name, value in one.items() if _is_number(value))
    columns: dict[str, NDArray[Any]] = {"step": np.array([one["step"] for one in records], np.int64)}
    for name in names:
        if name != "step":
            values = [one.get(name) for one in records]
            columns[name] = np.array([value if _is_number(value) else np.nan for value in values], np.float64)
    return Metrics(columns)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

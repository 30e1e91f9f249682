"""`argosy sweep`: a run for each combination, all checked before the first, and finished ones not trained again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.errors import ArgosyError
from argosy.launch.sweep_trials import plan_sweep
from argosy.record.jsonl import read_jsonl

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Write = Callable[..., Path]


def test_a_sweep_trains_every_combination_and_lists_the_best_first(
    argosy: Run, write_spec: Write, tmp_path: Path
) -> None:
    words = ("sweep", write_spec(eval={"every": 3, "batches": 1}), "optim.lr=1e-3,1e-6", "train.steps=3")
    done = argosy(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[-3:]] == ["name", "lr-1e-3", "lr-1e-6"]
    again = argosy(*words)
    assert "all 3 steps are done" in again.stdout
    root = tmp_path / "runs" / "tiny-sweep"
    for name in ("lr-1e-3", "lr-1e-6"):
        assert [event["event"] for event in read_jsonl(root / name / "events.jsonl")].count("done") == 1


def test_values_in_brackets_are_one_value_and_names_fit(write_spec: Write) -> None:
    sweep = plan_sweep(write_spec(), ["data.split=[90,10,0],[80,20,0]", "train.seed=1,2", "train.steps=3"])
    assert len(sweep.trials) == 4
    assert sweep.trials[0].overrides == ("data.split=[90,10,0]", "train.seed=1", "train.steps=3")
    assert len({trial.name for trial in sweep.trials}) == 4
    long = plan_sweep(write_spec(), [f"optim.no_decay=[{'a' * 80}],[]"])
    assert [trial.name for trial in long.trials] == ["trial-1", "no_decay"]


@pytest.mark.parametrize(
    ("overrides", "said"), [(["optim.lr=1"], "no key has several"), (["optim.lr=1e-3,abc"], "not the text 'abc'")]
)
def test_a_sweep_is_refused_before_its_first_run(
    overrides: list[str], said: str, write_spec: Write, tmp_path: Path
) -> None:
    with pytest.raises(ArgosyError) as refused:
        plan_sweep(write_spec(), overrides)
    assert said in refused.value.cause
    assert not (tmp_path / "runs").exists()

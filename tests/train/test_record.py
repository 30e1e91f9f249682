"""The record of a run says what trained which step: no start that trains nothing changes it, and no two runs are mixed in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from argosy.checkpoint.store import latest, listed
from argosy.config.resolve import resolve
from argosy.errors import ArgosyError
from argosy.measure.dry_run import dry_run
from argosy.record.jsonl import read_jsonl, read_metrics
from argosy.record.rundir import RunDir
from argosy.train import loop
from argosy.train.run import TrainOptions, train

Write = Callable[..., Path]
QUIET = TrainOptions(quiet=True)


def go(path: Path, *overrides: str) -> int:
    return train(resolve(path, overrides), path, QUIET)


def run_of(path: Path) -> RunDir:
    return RunDir(path.parent / "runs" / "tiny")


def resumes(path: Path) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(run_of(path).events) if event["event"] == "resume"]


def stored_lr(path: Path) -> float:
    return run_of(path).load_spec().optim.lr


class Killed(BaseException):
    """As a kill would end it: nothing is saved or told."""


def go_killed_at(step: int, path: Path, *overrides: str) -> None:
    real = loop.take_step

    def step_or_die(*args: Any, **facts: Any) -> Any:
        if facts["step"] >= step:
            raise Killed
        return real(*args, **facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "take_step", step_or_die)
        with pytest.raises(Killed):
            go(path, *overrides)


def test_a_start_that_trains_nothing_stores_nothing(write_spec: Write) -> None:
    path = write_spec()
    go(path)
    before = run_of(path).resolved_file.read_bytes()
    go(path, "optim.lr=5e-4")  # the run is finished
    dry_run(resolve(path, ["optim.lr=5e-4", "train.steps=8"]), QUIET)
    with pytest.raises(ArgosyError):
        go(path, "optim.lr=5e-4", "train.steps=8", "data.seq_len=16")
    go_killed_at(0, path, "optim.lr=5e-4", "train.steps=8")
    assert run_of(path).resolved_file.read_bytes() == before
    go(path, "optim.lr=5e-4", "train.steps=8")
    assert any(change.startswith("optim.lr:") for change in resumes(path)[-1]["changes"])
    assert stored_lr(path) == 5e-4


def test_a_change_is_told_until_a_checkpoint_was_made_with_it(write_spec: Write) -> None:
    path = write_spec(checkpoint={"every": 4, "mode": "sync"})
    go(path, "train.steps=4", "optim.schedule=constant")
    go_killed_at(7, path, "optim.schedule=constant", "optim.lr=5e-4", "train.steps=8")  # two steps, and no save
    assert stored_lr(path) == 5e-4
    go(path, "optim.schedule=constant", "optim.lr=5e-4", "train.steps=8")
    go(path, "optim.schedule=constant", "optim.lr=5e-4", "train.steps=9")
    lr = [[c for c in event["changes"] if c.startswith("optim.lr:")] for event in resumes(path)]
    assert lr == [["optim.lr: 0.001 -> 0.0005"], ["optim.lr: 0.001 -> 0.0005"], []]


def test_going_back_to_an_older_checkpoint_compares_with_what_made_that(write_spec: Write) -> None:
    path = write_spec(checkpoint={"every": 4, "mode": "sync"})
    go(path, "train.steps=4", "optim.schedule=constant")
    go(path, "train.steps=8", "optim.schedule=constant", "optim.lr=5e-4")
    shutil.rmtree(listed(run_of(path).checkpoints)[0])
    go(path, "train.steps=8", "optim.schedule=constant")
    last = resumes(path)[-1]
    assert not [change for change in last["changes"] if change.startswith("optim.lr:")]
    assert "step 8 was saved once, and the newest checkpoint is step 4" in last["notes"][0]
    assert stored_lr(path) == 1e-3


def test_a_run_whose_checkpoints_are_gone_is_not_begun_into_the_same_record(write_spec: Write) -> None:
    path = write_spec()
    go(path)
    run = run_of(path)
    before = run.metrics.read_bytes()
    for checkpoint in listed(run.checkpoints):
        shutil.rmtree(checkpoint)
    for start in (lambda: go(path), lambda: dry_run(resolve(path), QUIET)):
        with pytest.raises(ArgosyError, match="had saved step 6") as refusal:
            start()
        assert refusal.value.code == "run.checkpoints-gone"
    assert run.metrics.read_bytes() == before
    train(resolve(path), path, TrainOptions(quiet=True, fresh=True, archive=True))
    assert list(read_metrics(run.metrics)) == [1, 2, 3, 4, 5, 6]
    assert (run.root.with_name("tiny.old-1") / "metrics.jsonl").read_bytes() == before


def test_steps_that_were_never_saved_are_said_to_be_taken_again(write_spec: Write) -> None:
    path = write_spec(checkpoint={"every": 100})
    go_killed_at(4, path)
    go(path)
    started = [event for event in read_jsonl(run_of(path).events) if event["event"] == "start"]
    assert "steps 1 to 3 of an earlier start were never saved" in started[-1]["notes"][0]


def test_metrics_that_are_missing_are_told(write_spec: Write) -> None:
    path = write_spec()
    go(path)
    run_of(path).metrics.unlink()
    go(path, "train.steps=8")
    assert "metrics.jsonl is missing or empty" in resumes(path)[-1]["notes"][0]


def test_a_missing_record_of_the_spec_is_told(write_spec: Write) -> None:
    path = write_spec()
    go(path)
    run_of(path).resolved_file.unlink()
    go(path, "train.steps=8", "optim.lr=5e-3")
    assert "resolved.json is missing: it cannot be told whether keys" in resumes(path)[-1]["notes"][0]


def test_checkpoints_of_another_run_are_refused_and_a_copy_of_the_run_is_not(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec()
    go(path)
    go(path, "name=other", "train.seed=5")
    shutil.copytree(run_of(path).root, tmp_path / "copies" / "tiny")
    go(path, f"runs_dir={tmp_path / 'copies'}", "train.steps=8")
    ours, theirs = run_of(path).checkpoints, tmp_path / "runs" / "other" / "checkpoints"
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    with pytest.raises(ArgosyError, match="was saved by another run"):
        go(path, "train.steps=8")
    run_of(path).resolved_file.unlink()  # as a damaged record's own fix says
    assert go(path, "train.steps=8") == 0
    assert run_of(path).identity == RunDir(tmp_path / "runs" / "other").identity


@pytest.mark.parametrize("how", ["whole", "inside"])
def test_a_run_directory_deleted_while_training_is_noticed_at_once_and_made_again(
    write_spec: Write, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = write_spec(checkpoint={"every": 5, "mode": "sync"}, log={"every": 1})
    run, real = run_of(path), loop.take_step

    def delete_before(*args: Any, **facts: Any) -> Any:
        if facts["step"] == 3:
            for part in [run.root] if how == "whole" else run.root.glob("[!.]*"):
                shutil.rmtree(part) if part.is_dir() else part.unlink()
        return real(*args, **facts)

    monkeypatch.setattr(loop, "take_step", delete_before)
    assert go(path) == 0
    (alert,) = [event for event in read_jsonl(run.events) if event.get("alert") == "directory"]
    assert alert["step"] == 3
    assert list(read_metrics(run.metrics)) == [3, 4, 5, 6]
    assert [checkpoint.name for checkpoint in listed(run.checkpoints)] == ["step-00000006", "step-00000005"]
    assert run.load_spec() == resolve(path).spec
    monkeypatch.undo()
    assert go(path, "train.steps=8") == 0  # it goes on as any other


def test_a_run_directory_that_was_moved_is_told_at_once_and_not_written_over(
    write_spec: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_spec(checkpoint={"every": 5, "mode": "sync"}, log={"every": 1})
    run, real = run_of(path), loop.take_step
    moved = RunDir(run.root.with_name("moved"))

    def move_before(*args: Any, **facts: Any) -> Any:
        if facts["step"] == 2:
            run.root.rename(moved.root)
        return real(*args, **facts)

    monkeypatch.setattr(loop, "take_step", move_before)
    with pytest.raises(ArgosyError, match="moved or replaced"):
        go(path)
    alerts = [event for event in read_jsonl(moved.events) if event.get("alert") == "directory"]
    assert [event["step"] for event in alerts] == [2]
    assert list(read_metrics(moved.metrics)) == [1, 2, 3, 4, 5]
    assert not run.root.exists()


def test_lengthening_a_cosine_run_says_how_the_rate_jumps_and_what_else_there_is(write_spec: Write) -> None:
    path = write_spec(optim={"lr": 1e-3, "schedule": "cosine"})
    go(path)
    (line,) = [line for line in dry_run(resolve(path, ["train.steps=12"]), QUIET) if "learning rate" in line]
    go(path, "train.steps=12")
    assert line in resumes(path)[-1]["notes"]
    metrics = read_metrics(run_of(path).metrics)
    assert f"rises from {metrics[6]['lr']:.3g} to {metrics[7]['lr']:.3g} at step 7 (train.steps: 6 -> 12)" in line
    assert metrics[7]["lr"] > 4 * metrics[6]["lr"]
    assert "optim.schedule=wsd" in line
    assert "optim.schedule=constant optim.lr=0.0001" in line
    go(path, "train.steps=14", "optim.schedule=constant", "optim.lr=0.0001")
    assert read_metrics(run_of(path).metrics)[14]["lr"] == 1e-4


def test_a_change_that_moves_no_rate_now_says_where_it_ends(write_spec: Write) -> None:
    path = write_spec(optim={"lr": 1e-3, "schedule": "wsd", "decay": 2})
    go(path, "train.steps=4", "optim.schedule=constant", "optim.decay=null")
    go(path, "train.steps=8", "checkpoint.keep=9")
    (line,) = [note for note in resumes(path)[-1]["notes"] if "learning rate" in note]
    assert "the learning rate of step 5 is 0.001, as it was planned; the last step, 8, has 0.0001" in line
    go(path, "train.steps=8", "checkpoint.keep=8")
    assert latest(run_of(path).checkpoints, print).progress.step == 8  # type: ignore[union-attr]


def test_records_of_earlier_versions_of_argosy_go_on(write_spec: Write) -> None:
    path = write_spec()
    go(path)
    document = orjson.loads(run_of(path).resolved_file.read_bytes())
    del document["id"], document["earlier"]
    run_of(path).resolved_file.write_bytes(orjson.dumps(document))
    assert go(path, "train.steps=8") == 0
    assert run_of(path).identity is not None

"""Saves beside training: the numbers of the step they are of, skipped rather than queued, tried again where they fail."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from argosy.checkpoint.host_buffer import HostBuffer
from argosy.checkpoint.manifest import verify
from argosy.checkpoint.store import listed, step_of
from argosy.config.resolve import resolve
from argosy.errors import EXIT_DONE, ArgosyError
from argosy.record.jsonl import read_jsonl
from argosy.train import saving
from argosy.train.run import TrainOptions, train
from waiting import PATIENCE_S, wait_for

Write = Callable[..., Path]


def go(path: Path, *overrides: str) -> int:
    return train(resolve(path, overrides), path, TrainOptions(quiet=True))


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(run / "events.jsonl") if event["event"] in kinds]


def steps(run: Path) -> list[int]:
    return sorted(step_of(path) for path in listed(run / "checkpoints"))


def same_tensors(one: Path, other: Path) -> bool:
    a, b = verify(one), verify(other)
    groups = [(a.weights(), b.weights()), (a.optimizer(), b.optimizer())]
    return all(x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in groups)


@pytest.fixture
def slow_disk(tmp_path: Path) -> Iterator[None]:
    """What is written beside training takes until the save of step 4 was skipped for it."""
    write = saving.write

    def waiting(root: Path, *arguments: Any) -> Path:
        if threading.current_thread() is not threading.main_thread():
            wait_for(lambda: 4 in {event["step"] for event in events(root.parent, "save-skipped")})
        return write(root, *arguments)

    with patch.object(saving, "write", waiting):
        yield


@pytest.mark.usefixtures("slow_disk")
def test_a_save_beside_training_has_the_numbers_of_its_step_and_others_are_skipped(
    write_spec: Write, tmp_path: Path
) -> None:
    go(write_spec(), "name=sync", "checkpoint.keep=9", "checkpoint.every=1")
    assert (
        go(write_spec(), "name=async", "checkpoint.mode=async", "checkpoint.every=1", "checkpoint.keep=9") == EXIT_DONE
    )
    one, run = tmp_path / "runs" / "sync" / "checkpoints", tmp_path / "runs" / "async"
    assert {1, 6} <= set(steps(run))
    assert all(same_tensors(path, one / path.name) for path in listed(run / "checkpoints"))
    skipped = [(event["step"], event["writing"]) for event in events(run, "save-skipped")]
    assert skipped[:3] == [(2, 1), (3, 1), (4, 1)]
    assert {step for step, _ in skipped} | set(steps(run)) == set(range(1, 7))


def test_training_waits_for_no_memory_to_be_prepared_and_ends_the_thread_that_does(
    write_spec: Write, tmp_path: Path
) -> None:
    preparing: list[threading.Thread] = []

    def endless(buffer: HostBuffer, stop: threading.Event) -> None:
        preparing.append(threading.current_thread())
        assert stop.wait(PATIENCE_S)

    with patch.object(HostBuffer, "prepare", endless):
        assert go(write_spec(), "checkpoint.mode=async", "checkpoint.every=2") == EXIT_DONE
    assert preparing
    assert not any(thread.is_alive() for thread in preparing)
    assert {2, 6} <= set(steps(tmp_path / "runs" / "tiny"))


def block(run: Path, step: int) -> None:
    """Something that is no directory lies where the step's files would be written."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run / "checkpoints" / f".step-{step:08d}.partial").write_text("in the way")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_that_fails_is_told_and_tried_again_and_training_goes_on(
    write_spec: Write, tmp_path: Path, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "tiny"
    block(run, 2)
    path = write_spec(train={"global_batch": 8, "steps": 40}, eval="off")
    with patch.object(saving, "RETRY_S", 0.0):
        assert (
            train(resolve(path, [f"checkpoint.mode={mode}", "checkpoint.keep=99"]), path, TrainOptions()) == EXIT_DONE
        )
    (failed,) = events(run, "save-failed")
    assert (failed["step"], failed["in_a_row"]) == (2, 1)
    assert "exists" in failed["cause"]
    assert "ALERT" in capfd.readouterr().out
    good = [event["step"] for event in events(run, "save")]
    assert good[-1] == 40
    if mode == "sync":
        assert good[0] == 3  # at once, not when the next is due


def test_saves_that_fail_again_and_again_stop_the_run(write_spec: Write, tmp_path: Path) -> None:
    for step in (2, 4):
        block(tmp_path / "runs" / "tiny", step)
    with pytest.raises(ArgosyError) as refusal:
        go(write_spec(), "checkpoint.max_failures=2")
    assert refusal.value.code == "checkpoint.save-failed"
    assert refusal.value.key == "checkpoint.max_failures"


def test_the_last_save_of_a_run_must_not_fail(write_spec: Write, tmp_path: Path) -> None:
    block(tmp_path / "runs" / "tiny", 6)
    with pytest.raises(ArgosyError) as refusal:
        go(write_spec(), "checkpoint.mode=async", "checkpoint.every=4")
    assert refusal.value.code == "checkpoint.save-failed"
    assert steps(tmp_path / "runs" / "tiny") == [4]


def test_milestones_are_kept_beside_the_newest(write_spec: Write, tmp_path: Path) -> None:
    go(write_spec(), "train.steps=10", "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_every=4")
    assert steps(tmp_path / "runs" / "tiny") == [4, 8, 9, 10]


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, [1, 6]), (0.0, [1, 2, 3, 4, 5, 6])])
def test_auto_saves_as_often_as_a_measured_save_is_worth(
    write_spec: Write, tmp_path: Path, seconds: float, expected: list[int]
) -> None:
    """The first tells what one costs: the next would be hours later, or is free."""
    clock = SimpleNamespace(perf_counter=itertools.count(0.0, seconds).__next__)
    with patch.object(saving, "FIRST_S", 1e-9), patch.object(saving, "time", clock):
        go(write_spec(), "checkpoint.every=auto", "checkpoint.mtbf=300d", "checkpoint.keep=9")
    assert steps(tmp_path / "runs" / "tiny") == expected

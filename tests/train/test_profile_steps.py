"""`argosy train --profile`: a trace of the steps that were named, and a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.config.resolve import resolve
from argosy.errors import ArgosyError
from argosy.train.profile_steps import Window
from argosy.train.run import TrainOptions, train

Write = Callable[..., Path]


def test_steps_are_read_as_people_write_them() -> None:
    assert Window.parse("10:13") == Window(10, 13)
    assert Window.parse("7") == Window(7, 8)
    for text in ("", "0:3", "5:5", "9:3", "a:b", "1:2:3", "-1"):
        with pytest.raises(ArgosyError) as refusal:
            Window.parse(text)
        assert refusal.value.key == "--profile"


def test_a_run_leaves_a_trace_and_says_where_the_time_went(
    write_spec: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_spec()
    assert train(resolve(path, ()), path, TrainOptions(profile="3:5")) == 0
    told = capsys.readouterr().out
    assert "profile of 2 steps" in told
    assert "gemm" in told
    trace = json.loads((tmp_path / "runs" / "tiny" / "profile" / "trace-rank0.json").read_text())
    assert any("mm" in event.get("name", "") for event in trace["traceEvents"])


def test_a_window_that_the_run_ends_in_is_written_too(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec()
    train(resolve(path, ()), path, TrainOptions(profile="6:100", quiet=True))
    assert (tmp_path / "runs" / "tiny" / "profile" / "trace-rank0.json").exists()


def test_steps_that_the_run_does_not_have_or_has_done_already_are_not_passed_over_in_silence(
    write_spec: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_spec()
    with pytest.raises(ArgosyError) as refusal:
        train(resolve(path, ()), path, TrainOptions(profile="99:101"))
    assert "6 steps" in refusal.value.cause
    assert not (tmp_path / "runs").exists()
    train(resolve(path, ()), path, TrainOptions(quiet=True))
    train(resolve(path, ("train.steps=8",)), path, TrainOptions(profile="2:4"))
    assert "steps 2 to 3 are done already" in capsys.readouterr().out

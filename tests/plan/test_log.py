"""A training log of another framework is read and compared with the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.errors import ArgosyError
from argosy.plan.advise import Question, answer
from argosy.plan.log import judge, read_log

LINE = (
    "iteration {step:8d}/ {steps:8d} | consumed samples: {samples:12d} | elapsed time per iteration (ms): {ms:.1f} | "
    "learning rate: 0.000E+00 | global batch size: {batch:5d} | loss scale: {scale:.1f} | "
    "number of skipped iterations: {skipped:3d} | number of nan iterations: {nan:3d} |"
)


def write(path: Path, milliseconds: list[float], *, every: int = 1, skipped: int = 0, nan: int = 0) -> Path:
    lines = [
        LINE.format(step=every * n, steps=500_000, samples=288 * every * n, ms=ms, batch=288, scale=2.0**20, skipped=skipped, nan=nan)
        for n, ms in enumerate(milliseconds, start=1)
    ]  # fmt: skip
    path.write_text("\n".join(["> building GPT model ...", *lines, "iteration of something else", ""]))
    return path


def says(path: Path, step_s: float | None = None) -> str:
    question = Question.read(
        "gpt3-6.7b", [], cluster="1xp5.48xlarge", global_batch=288, seq_len=2048, tokens=None, precision=None,
        what_if=None, price=None, hardware=None,
    )  # fmt: skip
    return "\n".join(judge(read_log(path), answer(question).shown[0]))


def test_a_run_of_years_that_skips_every_step_is_called_so(tmp_path: Path) -> None:
    told = says(write(tmp_path / "log", [250_000.0, 243_000.0, 243_400.0], skipped=1))
    # The first line is left out: it includes start-up.
    assert "243.20 s per step" in told
    assert "1,407 days (3.9 years)" in told
    assert "times the plan" in told
    assert "3 of 3 steps were skipped" in told
    assert "nothing has been learned yet" in told


def test_a_healthy_log_is_not_called_names(tmp_path: Path) -> None:
    told = says(write(tmp_path / "log", [9_000.0, 6_000.0, 6_100.0], every=10))
    assert "times the plan" not in told
    assert "skipped" not in told
    assert "NaN" not in told


def test_a_line_stands_for_the_steps_since_the_one_before(tmp_path: Path) -> None:
    log = read_log(write(tmp_path / "log", [5.0, 5.0, 5.0], every=100, skipped=3, nan=1))
    assert (log.logged, log.skipped, log.not_a_number, log.global_batch) == (300, 9, 3, 288)


@pytest.mark.parametrize("content", ["", "loss 3.2\nloss 3.1\n"])
def test_what_is_no_log_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "log"
    path.write_text(content)
    with pytest.raises(ArgosyError, match="no line with a step time"):
        read_log(path)
    with pytest.raises(ArgosyError, match="cannot be read"):
        read_log(tmp_path / "missing")

"""`argosy demo` in a short form keeps its promises: its stories make sense, and its model fits the machine's speed."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.demo.journey import side_by_side
from argosy.demo.sizes import ENOUGH_STEPS, FEWEST_STEPS, MOST_STEPS, SIZES, Size, choose_size, steps_within
from argosy.demo.stories import OPENING, stories
from argosy.record.jsonl import read_jsonl


def test_the_demo_trains_is_killed_resumes_and_learns(
    argosy: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    # One thread: on busy cores, several wait for each other.
    result = argosy("demo", "--seconds", 5, timeout=580, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert "killed at about step" in result.stdout
    assert "resuming from" in result.stdout
    loss = float(re.search(r"validation loss after step \d+: ([\d.]+)", result.stdout)[1])  # type: ignore[index]
    entropy = float(re.search(r"unigram entropy of the same text: +([\d.]+)", result.stdout)[1])  # type: ignore[index]
    # The model has learned to use context in the few steps that a slow machine has time for.
    assert loss < entropy
    events = [event["event"] for event in read_jsonl(tmp_path / "argosy-demo" / "runs" / "demo" / "events.jsonl")]
    assert "resume" in events
    assert events[-1] == "done"
    assert re.search(r"before training +after \d+ steps", result.stdout)
    assert "Next:" in result.stdout


def test_stories_are_the_same_on_every_machine_and_their_sums_are_right() -> None:
    written = list(stories(300))
    assert all(story.startswith(OPENING) for story in written)
    assert len(set(written)) == 300
    found = [re.search(r"found (\d+) \w+, and \w+ found (\d+)\. \"Now we have (\d+)", story) for story in written]
    sums = [tuple(map(int, match.groups())) for match in found if match]
    assert len(sums) > 50
    assert all(a + b == c for a, b, c in sums)
    digest = hashlib.sha256("\n".join(written).encode()).hexdigest()
    assert digest.startswith("ab145093cf01ab25"), (
        "stories changed: a corpus of an earlier demo would be taken for this one"
    )


@pytest.mark.parametrize("slower", [0.001, 0.1, 1, 10, 100, 10_000])
def test_the_largest_model_with_enough_steps_is_taken_whatever_the_speed(slower: float) -> None:
    measured: list[Size] = []

    def seconds_per_step(size: Size) -> float:
        measured.append(size)
        return slower * size.layers * size.hidden**2 * size.global_batch / 1e8

    size, step_s = choose_size(60, seconds_per_step)
    assert step_s == seconds_per_step(size)
    steps = steps_within(60, step_s)
    assert FEWEST_STEPS <= steps <= MOST_STEPS
    assert steps >= ENOUGH_STEPS or size == SIZES[0]
    assert steps * step_s <= 60 or steps == FEWEST_STEPS
    if slower <= 0.1:
        assert size == SIZES[-1]
    # A larger size is not even measured.
    if slower == 10_000:
        assert set(measured) == {SIZES[0]}


def test_samples_stand_side_by_side_and_bytes_that_are_no_text_are_dots() -> None:
    first, _, *rows = side_by_side(("before", "a\ufffd\x00 " * 20), ("after", "one two")).splitlines()
    assert first.split("|")[1].split() == ["before", "after"]
    assert "a··" in rows[0]
    assert rows[0].endswith("one two")
    assert "\ufffd" not in "".join(rows)

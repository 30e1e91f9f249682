"""Whether a run lives is seen by its heart beats as they change, and not by the clock of another machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from argosy.record.rundir import RunDir
from argosy.watch.doctor import diagnose
from argosy.watch.hearing import Hearing
from argosy.watch.runs import Run
from watch.test_doctor import beat, started


@contextmanager
def beating(run: RunDir, off_s: float) -> Iterator[None]:
    """The heart beats of a rank on a machine whose clock is off by so much."""
    stop = threading.Event()

    def go_on() -> None:
        number = 0
        while not stop.wait(0.3):
            number += 1
            beat(run, 0, beat=number, time=time.time() + off_s)

    beat(run, 0, beat=0, time=time.time() + off_s)
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("off_s", [-1000.0, 1000.0])
def test_a_run_whose_clock_is_off_is_seen_to_live_and_not_beyond_its_death(off_s: float, tmp_path: Path) -> None:
    run = started(tmp_path)
    with beating(run, off_s):
        one = Run("run", run.root)
        one.listen()
        assert one.state() == "running"
        assert diagnose(one)[0].name == "running"
    assert Run("run", run.root).state() == "dead"


def test_a_run_by_our_own_clock_is_judged_at_once(tmp_path: Path) -> None:
    run = started(tmp_path)
    beat(run, 0)
    one, began = Run("run", run.root), time.monotonic()
    one.listen()
    assert time.monotonic() - began < 5
    assert one.state() == "running"


def test_a_beat_that_came_between_two_looks_far_apart_is_as_old_as_it_says() -> None:
    hearing = Hearing()
    hearing.note({0: {"beat": 1, "time": time.time() - 90}})
    time.sleep(0.5)
    assert hearing.note({0: {"beat": 2, "time": time.time() - 0.2}})[0]["age_s"] < 0.45
    assert (
        hearing.note({0: {"beat": 3, "time": time.time() - 900}})[0]["age_s"] < 0.2
    )  # by another clock: since the last look
    time.sleep(0.3)
    assert hearing.note({0: {"beat": 3, "time": time.time() - 900}})[0]["age_s"] >= 0.3

"""Whether a run is alive is decided by changes of its heartbeats, not by the clock of another machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from argosy.record.rundir import RunDir
from argosy.watch import hearing
from argosy.watch.diagnosis import diagnose
from argosy.watch.hearing import HeartbeatAges
from argosy.watch.run_list import Run
from watch.test_doctor import beat, started


@contextmanager
def beating(run: RunDir, off_s: float) -> Iterator[None]:
    """Write the heartbeats of a rank on a machine whose clock is off by this much."""
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


class Clock:
    """The local clock, set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.time()
        monkeypatch.setattr(hearing, "time", self)

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_run_by_our_own_clock_is_judged_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, clock = started(tmp_path), Clock(monkeypatch)
    beat(run, 0, time=clock.now - 1)
    one, began = Run("run", run.root), clock.now
    one.listen()
    assert clock.now == began
    assert one.state() == "running"


def test_a_beat_that_came_between_two_looks_far_apart_is_as_old_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ages = HeartbeatAges()

    def age(number: int, told_s: float) -> float:
        return float(ages.with_ages({0: {"beat": number, "time": clock.now - told_s}})[0]["age_s"])

    age(1, 90)
    clock.sleep(50)
    assert age(2, 20) == pytest.approx(20)
    clock.sleep(10)
    # The heartbeat comes from another clock: its age is the time since the last look.
    assert age(3, 900) == pytest.approx(10)
    clock.sleep(30)
    assert age(3, 930) == pytest.approx(40)


def test_a_beat_from_the_future_does_not_come_alive_when_our_clock_gets_there(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ages, last = HeartbeatAges(), {0: {"beat": 7, "time": clock.now + 600}}
    for _ in range(10):
        assert ages.with_ages(last)[0]["age_s"] >= 300
        clock.sleep(120)

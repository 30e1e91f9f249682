"""The goodput ledger of a run, across restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.record.jsonl import JsonlWriter
from argosy.record.ledger import PARTS, Ledger, process_started
from argosy.record.rundir import RunDir


def log(path: Path, step: int, time: float, ledger: Ledger) -> None:
    with JsonlWriter(path) as metrics:
        metrics.write({"step": step, "time": time, **ledger.report(None)})


def three_logs(path: Path) -> None:
    ledger = Ledger()
    ledger.spend("startup", 5)
    for step in (10, 20, 30):
        ledger.spend("productive", 100)
        ledger.spend("save", 2)
        log(path, step, 1000 + 10 * step, ledger)


def event(run: RunDir, kind: str, time: float) -> None:
    with JsonlWriter(run.events) as events:
        events.write({"event": kind, "step": 30, "time": time})


def test_work_done_again_after_a_restart_is_lost_and_the_gap_is_down_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    three_logs(run.metrics)
    again = Ledger.resumed(run, 20, started=1400.0)
    assert again.spent["productive"] == 200
    assert again.spent["lost"] == 100
    # From 1300 to 1400.
    assert again.spent["down"] == 100
    assert again.spent["save"] == 6
    report = again.report(price=36.0)
    assert report["goodput"] == pytest.approx(200 / (5 + 300 + 6 + 100))
    # Time without machines costs nothing.
    assert report["cost"] == pytest.approx((5 + 300 + 6) / 100)
    assert sum(report["spent"].values()) == pytest.approx(5 + 300 + 6 + 100)


@pytest.mark.parametrize(
    ("kind", "part", "seconds", "down"),
    [
        # 100 seconds of steps after the checkpoint, and 60 until the death was noticed.
        ("rank-died", "lost", 160, 40),
        # Restarted within the job: its machines stay allocated.
        ("restart", "lost", 200, 0),
        ("interrupted", "save", 6 + 60, 40),
    ],
)
def test_what_followed_the_last_record_is_paid_for_until_the_event_that_ends_the_attempt(
    tmp_path: Path, kind: str, part: str, seconds: float, down: float
) -> None:
    run = RunDir(tmp_path)
    event(run, "start", 900)
    three_logs(run.metrics)
    event(run, kind, 1360)
    again = Ledger.resumed(run, 20, started=1400.0)
    assert again.spent[part] == seconds
    assert again.spent["down"] == down
    assert again.report(3600.0)["cost"] == pytest.approx(5 + 300 + 6 + 100 - down)


def test_a_line_cut_by_a_kill_and_a_missing_file_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert Ledger.resumed(RunDir(tmp_path), 0, 0.0).spent == dict.fromkeys(PARTS, 0.0)
    ledger = Ledger()
    ledger.spend("productive", 7)
    log(path, 3, 50.0, ledger)
    with path.open("ab") as file:
        file.write(b'{"step": 4, "spent": {"produ')
    assert Ledger.resumed(RunDir(tmp_path), 3, 60.0).spent["productive"] == 7


def test_a_long_record_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as metrics:
        for step in range(1, 3001):
            metrics.write({"step": step, "time": float(step), "spent": {"productive": 2.0 * step}, "pad": "x" * 60})
    assert Ledger.resumed(RunDir(tmp_path), 1000, 3000.0).spent["lost"] == 4000


def test_the_start_of_this_process_is_in_the_past() -> None:
    import time

    assert 0 <= time.time() - process_started() < 3600

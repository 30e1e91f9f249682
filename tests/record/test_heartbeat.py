"""A heartbeat shows where a rank is, and goes on when the rank itself can no longer run."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from argosy.record import heartbeat
from argosy.record.heartbeat import Heartbeat, HeartbeatFiles, clear_heartbeats, read_heartbeats
from argosy.record.jsonl import read_jsonl
from argosy.record.pulse import PAGE_BYTES, PHASES, Page, RankProgress, process_state
from waiting import wait_for

HOLD_THE_GIL = """
import ctypes, sys
from pathlib import Path
from argosy.record.heartbeat import Heartbeat
beat = Heartbeat(3, attempt=2)
beat.begin(10)
beat.enter("data", 11)
beat.publish(Path(sys.argv[1]))
ctypes.PyDLL(None).sleep(600)  # unlike CDLL, PyDLL keeps the GIL
"""


def beat_of(directory: Path, rank: int, *, after: int = 0, **expected: Any) -> dict[str, Any]:
    """Wait for a heartbeat with the expected values, later than beat `after`, and return it."""

    def look() -> dict[str, Any] | None:
        record = read_heartbeats(directory).get(rank)
        fits = record and record["beat"] > after and all(record[key] == value for key, value in expected.items())
        return record if fits else None

    found: dict[str, Any] = wait_for(look, otherwise=lambda: f"never {expected}: {read_heartbeats(directory)}")
    return found


def test_a_record_says_which_rank_is_where_and_that_it_has_ended(tmp_path: Path) -> None:
    with Heartbeat(1, attempt=4) as heartbeat:
        heartbeat.begin(20)
        heartbeat.publish(tmp_path / "heartbeat")
        heartbeat.enter("forward_backward", 21)
        record = beat_of(tmp_path / "heartbeat", 1, phase="forward_backward")
    assert (record["rank"], record["attempt"], record["step"], record["pid"]) == (1, 4, 21, os.getpid())
    assert record["alive"]
    assert record["memory_bytes"] > 2**20
    assert record.keys() >= {"host", "collective", "time", "monotonic", "beat", "progress", "phase_s", "state"}
    assert beat_of(tmp_path / "heartbeat", 1, alive=False)["phase"] == "done"


def test_beats_go_on_while_the_gil_is_held_and_while_the_rank_is_stopped_and_end_with_it(tmp_path: Path) -> None:
    rank = subprocess.Popen([sys.executable, "-c", HOLD_THE_GIL, str(tmp_path)])
    try:
        first = beat_of(tmp_path, 3)
        later = beat_of(tmp_path, 3, after=first["beat"] + 1)
        assert (later["step"], later["phase"], later["progress"]) == (11, "data", first["progress"])
        assert later["phase_s"] > first["phase_s"]
        rank.send_signal(signal.SIGSTOP)
        assert beat_of(tmp_path, 3, state="T")["alive"]
        rank.kill()
        assert not beat_of(tmp_path, 3, alive=False)["alive"]
    finally:
        rank.kill()
        rank.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
def test_a_writer_of_an_earlier_start_that_was_paused_does_not_write_over_the_next_one(tmp_path: Path) -> None:
    beats = tmp_path / "heartbeat"
    rank = subprocess.Popen([sys.executable, "-c", HOLD_THE_GIL, str(beats)])
    try:
        beat_of(beats, 3)
        [writer] = [int(pid) for pid in Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()]
        os.kill(writer, signal.SIGSTOP)
        wait_for(lambda: (process_state(writer) or "?")[0] == "T")
    finally:
        rank.kill()
        rank.wait()
    clear_heartbeats(beats)
    assert read_heartbeats(beats) == {}
    (beats / "3.json").write_text('{"rank": 3, "attempt": 3, "alive": true}')
    os.kill(writer, signal.SIGCONT)
    wait_for(lambda: (process_state(writer) or "Z")[0] == "Z")
    assert read_heartbeats(beats) == {3: {"rank": 3, "attempt": 3, "alive": True}}
    clear_heartbeats(beats)
    assert [*tmp_path.iterdir(), *beats.iterdir()] == [beats], "nothing of earlier starts is left"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a file is Linux's")
def test_a_reader_never_sees_a_change_half_made(tmp_path: Path) -> None:
    fd = os.memfd_create("page")
    os.ftruncate(fd, PAGE_BYTES)
    writer, reader = Page(fd), Page(fd)
    assert reader.read() is None
    child = os.fork()
    if child == 0:
        # Until the process is killed.
        for number in itertools.count():
            writer.write(RankProgress(number, number, number, number, number, PHASES[number % len(PHASES)]))
    seen = set[int]()
    try:
        while len(seen) < 100:
            if (progress := reader.read()) is not None:
                entered, *others, phase = progress
                assert others == [entered] * 4
                assert phase == PHASES[entered % len(PHASES)]
                seen.add(entered)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(fd)


def test_the_longest_time_in_a_phase_leaves_out_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    page = tmp_path / "page"
    heartbeat = Heartbeat(page=page)
    with page.open("rb+") as file:
        reader = Page(file.fileno())

    def longest() -> float:
        progress = reader.read()
        assert progress is not None
        return progress.longest

    heartbeat.begin(5)
    heartbeat.enter("data", 6)
    now += 60
    heartbeat.enter("data", 7)
    assert longest() == 0.0
    now += 2
    heartbeat.enter("data", 8)
    assert longest() == 2.0
    heartbeat.close()


def test_beats_within_a_phase_keep_the_long_limit_until_it_has_ended_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    page = tmp_path / "page"
    heartbeat = Heartbeat(page=page)
    with page.open("rb+") as file:
        reader = Page(file.fileno())
    heartbeat.enter("score_tasks", 8)
    seen = []
    for seconds in (1, 30, 2):
        now += seconds
        heartbeat.beat()
        seen.append(reader.read())
    assert [(one.entered, one.since, one.longest) for one in seen if one] == [(2, 1001, 0), (3, 1031, 0), (4, 1033, 0)]
    heartbeat.enter("evaluate", 8)
    # Its own phase: validation has learnt nothing from it.
    assert reader.read() == RankProgress(5, 8, 0, now, 0.0, "evaluate")
    heartbeat.enter("score_tasks", 9)
    assert reader.read() == RankProgress(6, 9, 0, now, 30.0, "score_tasks")
    heartbeat.close()


def test_standing_still_is_told_once_with_the_rank_that_is_furthest_behind_and_anew_after_it_has_moved(
    tmp_path: Path,
) -> None:
    beats, events = tmp_path / "heartbeat", tmp_path / "events.jsonl"
    beats.mkdir()
    (beats / "1.json").write_text('{"rank": 1, "host": "node7", "step": 11, "phase": "data", "progress": 3}')
    with Heartbeat(0) as heartbeat:
        heartbeat.begin(11)
        heartbeat.enter("forward_backward", 12)
        heartbeat.publish(beats, stalls=(events, 0.2))
        first = beat_of(beats, 0)
        beat_of(beats, 0, after=first["beat"] + 2)
        told = list(read_jsonl(events))
        assert [(event["event"], event["alert"], event["rank"]) for event in told] == [("alert", "stall", 1)]
        assert "rank 1 on node7 is furthest behind, at step 11 in data" in told[0]["text"]
        heartbeat.enter("optimizer")
        beat = read_heartbeats(beats)[0]["beat"]
        beat_of(beats, 0, after=beat + 2)
        assert [event["step"] for event in read_jsonl(events)] == [12, 12]


def test_a_look_reads_only_the_heartbeats_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, record = [], heartbeat._record
    monkeypatch.setattr(heartbeat, "_record", lambda path: read.append(Path(path).name) or record(path))
    for rank in range(5):
        (tmp_path / f"{rank}.json").write_text(f'{{"rank": {rank}, "beat": 1}}')
    files = HeartbeatFiles(tmp_path)
    assert list(files.read()) == [0, 1, 2, 3, 4]
    read.clear()
    (tmp_path / "3.json").write_text('{"rank": 3, "beat": 20}')
    (tmp_path / "4.json").unlink()
    (tmp_path / "5.json").symlink_to(tmp_path / "0.json")
    assert {rank: beat["beat"] for rank, beat in files.read().items()} == {0: 1, 1: 1, 2: 1, 3: 20}
    assert read == ["3.json", "5.json"] or read == ["5.json", "3.json"]

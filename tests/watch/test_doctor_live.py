"""The doctor on real failures: ranks that hang, are killed, are slow, diverge, or fill the disk."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from argosy.record.heartbeat import read_heartbeats
from argosy.record.jsonl import read_jsonl
from argosy.watch.diagnosis import diagnose
from argosy.watch.finding import Finding
from argosy.watch.run_list import Run
from forking import ARGOSY, Popen
from waiting import PATIENCE_S, wait_for

Write = Callable[..., Path]
TWO = {"parallel": {"dp_replicate": 2, "micro_batch": 4}, "eval": "off", "log": {"every": 5}}
STEPS = {"train": {"global_batch": 8, "steps": 100_000}, "checkpoint": {"every": "1h"}}


@contextlib.contextmanager
def training(path: Path, *overrides: str, nproc: int = 2) -> Iterator[Popen]:
    ranks = ["--nproc", str(nproc)] if nproc > 1 else []
    command = [*ARGOSY, "train", str(path), *overrides, *ranks, "--quiet"]
    trainer = Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield trainer
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait(PATIENCE_S)


def rank_at_work(run: Path, rank: int) -> int:
    """Wait until the rank has made some steps, and return its process id."""
    beat = wait_for(lambda: (b := read_heartbeats(run / "heartbeat").get(rank)) and b["step"] > 10 and b)
    return int(beat["pid"])


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(run / "events.jsonl") if event["event"] == kind]


def verdict(run: Path) -> Finding:
    return diagnose(Run(run.name, run))[0]


def test_a_rank_that_hangs_is_named(write_spec: Write, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    # Ranks that start on a busy machine must not be taken for stalled ones. Their limit is three times this.
    with training(write_spec(**TWO, **STEPS), "fault.stall_after=8", "fault.restarts=0") as trainer:
        os.kill(rank_at_work(run, 1), signal.SIGSTOP)
        trainer.wait(PATIENCE_S)
        said = verdict(run).verdict
    assert said.startswith("rank 1 made no progress"), said
    assert "is stopped" in said


def test_a_rank_that_is_killed_is_named(write_spec: Write, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    with training(write_spec(**TWO, **STEPS), "fault.restarts=0") as trainer:
        os.kill(rank_at_work(run, 1), signal.SIGKILL)
        trainer.wait(PATIENCE_S)
        said = verdict(run).verdict
    assert "rank 1" in said, said
    assert "SIGKILL" in said
    for rank in (0, 1):
        log = run / "logs" / "1" / f"{rank}.log"
        # The first rank may be killed before it reports anything else.
        wait_for(lambda log=log: log.exists() and "-- argosy: it " in log.read_text())
        assert log.read_text().startswith(f"-- argosy: rank {rank} of 2 on ")
    assert "it was ended, or crashed" in log.read_text()


def test_one_process_that_crashes_has_said_where_in_its_log(write_spec: Write, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    with training(write_spec(eval="off", log={"every": 5}, **STEPS), nproc=1) as trainer:
        os.kill(rank_at_work(run, 0), signal.SIGSEGV)
        assert trainer.wait(PATIENCE_S) == -signal.SIGSEGV
        log = run / "logs" / "1" / "0.log"
        wait_for(lambda: log.exists() and "it was ended, or crashed" in log.read_text())
        # The process that keeps the log holds the run for a moment more.
        wait_for(lambda: verdict(run).verdict == "rank 0: native code of a rank crashed (logs/1/0.log)")
    # The crash may have come while it waited for a batch.
    assert "argosy/train/loop.py" in log.read_text()


# tests/record/test_alerts.py is the short form.
@pytest.mark.slow
def test_a_rank_that_is_slow_is_named(write_spec: Write, tmp_path: Path) -> None:
    run, stop = tmp_path / "runs" / "tiny", threading.Event()

    def slow_down(pid: int) -> None:
        """Stop the process for much of its time, as a greedy neighbour would."""
        while not stop.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.04)
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.03)

    with training(write_spec(**TWO, **STEPS)):
        pid = rank_at_work(run, 1)
        brake = threading.Thread(target=slow_down, args=(pid,))
        brake.start()
        try:
            wait_for(lambda: [e for e in events(run, "alert") if e["alert"] == "slow-rank"], 300)
        finally:
            stop.set()
            brake.join()
        said = [finding for finding in diagnose(Run(run.name, run)) if finding.name == "slow-rank"]
    assert said
    assert "rank 1 takes" in said[0].verdict


def test_numbers_that_are_none_are_told(write_spec: Write, tmp_path: Path) -> None:
    spec = write_spec(
        optim={"lr": 1e30, "clip": None}, train={"global_batch": 8, "steps": 60}, eval="off", log={"every": 1}
    )
    with training(spec, nproc=1) as trainer:
        assert trainer.wait(PATIENCE_S) != 0
    found = verdict(tmp_path / "runs" / "tiny")
    assert found.name == "nan", found.verdict
    assert "nan" in found.verdict or "inf" in found.verdict
    failed = events(tmp_path / "runs" / "tiny", "failed")
    # A process without a supervisor reports its own end.
    assert len(failed) == 1
    assert failed[0]["fix"]


def test_a_full_disk_is_told(write_spec: Write, tmp_path: Path) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk can only be mounted by root")
    try:
        (disk / "ballast").write_bytes(bytes(5 << 20))
        with training(write_spec(eval="off"), f"runs_dir={disk}", "train.steps=30", nproc=1) as trainer:
            trainer.wait(PATIENCE_S)
        found = verdict(disk / "tiny")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
    assert found.name in ("disk-full", "save-failed"), found.verdict

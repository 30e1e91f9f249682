"""Faults of storage and clocks: full, read-only, slow; a wall clock that jumps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise

import pytest

from argosy.errors import EXIT_REFUSED
from argosy.record.jsonl import read_metrics
from faults.bench import SAVED_EVERY, SOON, Bench, Outcome
from faults.storage import preloaded


def disk_full(bench: Bench) -> Outcome:
    """No space for a save: the run goes on, reports it, and saves when there is space again."""
    with preloaded(bench, "checkpoints") as (env, orders), bench.run("disk-full", env=env) as run:
        run.wait_step(SAVED_EVERY + 1)
        orders("full")
        at = time.time()
        failed = run.wait_event("save-failed")
        orders("")
        assert run.wait() == 0, run.said
        assert "No space left" in str(failed)
        assert run.result() == bench.undisturbed()
        again = next(e["time"] for e in run.events("save") if e["time"] > failed["time"])
        return Outcome("went on, saved later, bit-equal", failed["time"] - at, again - at, 0)


def slow_storage(bench: Bench) -> Outcome:
    """Each fsync takes a second: steps do not wait for it."""
    with preloaded(bench, "checkpoints") as (env, orders):
        orders("slow 1000")
        with bench.run("slow-storage", env=env, train={"global_batch": 4, "steps": 400}, eval="off") as run:
            run.until(lambda: len(run.events("save")) >= 2, "two saves")
            first, second = (e["step"] for e in run.events("save")[:2])
            run.process.kill() if run.process else None
            run.wait()
            times = [r["time"] for r in read_metrics(run.root / "metrics.jsonl").values()]
            slowest = max(later - earlier for earlier, later in pairwise(times[1:]))
            assert slowest < 1.0, f"a step waited {slowest:.1f}s for storage"
            assert second - first > SAVED_EVERY, "a save that comes too soon is left out, not queued"
            return Outcome(f"slowest step {slowest:.2f}s", steps_lost=0)


def slow_last_save(bench: Bench) -> Outcome:
    """The last save of a run takes longer than the stall limit: no rank is reported as stalled."""
    with preloaded(bench, "checkpoints") as (env, orders):
        orders("slow 1000")
        steps = {"train": {"global_batch": 4, "steps": 5}, "checkpoint": {"every": 1}, "eval": "off"}
        with bench.run("slow-last-save", env=env, fault=SOON, **steps) as run:
            assert run.wait() == 0, run.said
            assert not run.events("stall"), run.events("stall")
            (last,) = (event for event in run.events("save") if event["step"] == 5)
            assert last["seconds"] > 3
            return Outcome(f"waited {last['seconds']:.1f}s for it", steps_lost=0)


def read_only(bench: Bench) -> Outcome:
    """A read-only run directory is refused at the start."""
    place = bench.root / "read-only"
    place.mkdir()
    if os.geteuid() == 0:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "none", place], check=False).returncode:
            pytest.skip("root writes everywhere, and may not mount a read-only file system here")
    else:
        place.chmod(0o500)
    try:
        with bench.run("on-read-only", runs_dir=str(place / "runs")) as run:
            started = time.time()
            assert run.wait() == EXIT_REFUSED
            assert run.said.count("error[run.unwritable]") == 1
            return Outcome("refused, exit 2", detected_s=time.time() - started)
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", place], check=True)


def clock_jump(bench: Bench) -> Outcome:
    """The wall clock goes forward by a day, and back: no rank is reported as dead."""
    with preloaded(bench, "nowhere") as (env, orders), bench.run("clock-jump", env=env, fault=SOON) as run:
        run.wait_step(10)
        orders("clock 86400")
        run.wait_step(20)
        orders("")
        assert run.wait() == 0, run.said
        assert not run.events("stall", "rank-died")
        assert run.result() == bench.undisturbed()
        return Outcome("not noticed", steps_lost=0)


def left_by_the_dead(bench: Bench) -> Outcome:
    """All processes are killed at once, whatever they held: the same command resumes the run at once."""
    before = set(os.listdir("/dev/shm"))
    with bench.run("left-by-the-dead") as run:
        run.wait_step(13)
        pids = [run.pid(rank) for rank in (0, 1)]
        # So that the launcher does not clean up after its ranks.
        run.signal(signal.SIGSTOP)
        at = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        run.signal(signal.SIGKILL)
        run.wait()
        run.start("--nproc", "2")
        assert run.wait() == 0, run.said
        assert run.result() == bench.undisturbed()
        assert set(os.listdir("/dev/shm")) <= before
        resumed = run.events("resume")[-1]
        return Outcome("went on, bit-equal", recovered_s=resumed["time"] - at, steps_lost=13 - resumed["step"])


def sinks_down(bench: Bench) -> Outcome:
    """No server listens at the sinks' addresses: training is not affected, and each is reported once."""
    nowhere = "http://127.0.0.1:9"
    sinks = {"mlflow": nowhere, "otel": nowhere, "prometheus": "192.0.2.1:9464"}
    with bench.run("sinks-down", log={"every": 1, "sinks": sinks, "alerts": {"webhook": nowhere}}) as run:
        assert run.wait() == 0, run.said
        assert run.result() == bench.undisturbed()
        down = Counter(event["sink"] for event in run.events("sink-down"))
        assert set(sinks) <= down.keys(), down
        assert set(down.values()) == {1}, down
        return Outcome("not noticed, each told of once, bit-equal", steps_lost=0)


def little_shared_memory(bench: Bench) -> Outcome:
    """The 64 MB of shared memory that a container has by default: refused at the start, with the key to set."""
    spec = bench.spec("little-shared-memory")
    script = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$0" -m argosy doctor "$1"'
    started = time.time()
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script, sys.executable, spec], capture_output=True, text=True, check=False)  # fmt: skip
    if "ermitted" in done.stderr or "permission" in done.stderr:
        pytest.skip(f"/dev/shm cannot be made small here: {done.stderr.strip()}")
    assert done.returncode == EXIT_REFUSED, done.stdout + done.stderr
    assert "cluster.shm" in done.stdout + done.stderr
    return Outcome("refused by the preflight", detected_s=time.time() - started)

"""The kill storm: a run of two ranks that is killed at random moments, many times, ends with the undisturbed result.

Loading, steps, evaluation and saving are all hit: one rank, or the supervisor with all ranks, is killed at a random moment of
an attempt. The short form kills twice; `slow` ones 200 and 1,000 times (`ARGOSY_STORM` sets another number,
`ARGOSY_STORM_SEED` other moments).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest

from argosy.checkpoint.store import verify
from argosy.record.jsonl import read_jsonl
from faults.bench import Bench, Outcome, Run

LONGEST_S = 3600.0 * 4


def storm(bench: Bench, name: str, kills: int, seed: int) -> tuple[int, int]:
    """Run one run after another, each killed until it finishes, until `kills` kills were made. Returns (kills, runs)."""
    rng = random.Random(seed)
    killed = runs = 0
    while killed < kills:
        runs += 1
        with bench.run(f"{name}-{runs}", "--fresh", "--archive", fault={"same_step": 1000, "restarts": 1000}) as run:
            while killed < kills and run.process is not None and run.process.poll() is None:
                killed += _kill_once(run, rng)
            assert run.wait() == 0, run.said
            _check(bench, run)
        print(f"{killed} kills in {runs} runs, all bit-equal", flush=True)
    return killed, runs


def _kill_once(run: Run, rng: random.Random) -> int:
    """Kill after a random time of an attempt: mostly during its steps, sometimes while it starts. Returns how many were killed."""
    assert run.process is not None
    attempt = len(run.events("start", "resume"))
    # While the ranks load, or before they have started.
    early = rng.random() < 0.2
    patience = time.monotonic() + 60
    while not early and run.process.poll() is None and time.monotonic() < patience:
        if len(run.events("start", "resume")) > attempt:
            break
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 4.0) if early else rng.uniform(0, 1.5))
    if run.process.poll() is not None:
        return 0
    if rng.random() < 0.3:
        run.process.kill()
        run.wait()
        run.start("--nproc", "2")
        return 1
    pid = run.living(rng.randrange(2))
    if pid is None:
        # The run was between two attempts, or at its end.
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return 1


def _check(bench: Bench, run: Run) -> None:
    assert run.result() == bench.undisturbed()
    for checkpoint in run.checkpoints:
        verify(checkpoint)
    assert not list((run.root / "checkpoints").glob(".*")), "a checkpoint was left half-made"
    assert not list((run.root / "checkpoints").glob("bad-*")), "a checkpoint was whole in name only"
    saved = 0
    for record in read_jsonl(run.root / "events.jsonl"):
        if record["event"] == "resume":
            assert record["step"] >= saved, "what was saved was lost again"
        saved = max(saved, record["step"] if record["event"] == "save" else 0)


@pytest.mark.timeout(3600)
def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(bench: Bench) -> None:
    killed, runs = storm(bench, "storm", 2, seed=0)
    bench.record(f"kill storm: {killed} kills in {runs} runs", Outcome("all bit-equal"))


@pytest.mark.slow
@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("kills", [int(os.environ.get("ARGOSY_STORM", "200")), 1000])
def test_a_long_storm(bench: Bench, kills: int) -> None:
    killed, runs = storm(bench, f"storm-{kills}", kills, seed=int(os.environ.get("ARGOSY_STORM_SEED", kills)))
    bench.record(f"kill storm: {killed} kills in {runs} runs", Outcome("all bit-equal"))

"""A run that is killed and started again gives, bit for bit, the numbers of one that never stopped.

Dropout, gradient accumulation, evaluation and saving are on. The short form kills at a few points; the long form
(`slow`) many times.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.checkpoint.manifest import verify
from argosy.checkpoint.store import listed
from argosy.errors import EXIT_RESUMABLE
from argosy.record.jsonl import read_jsonl, read_metrics
from faults.bench import PATIENCE_S, held
from forking import ARGOSY, Popen

STEPS = 24
MODEL = {"family": "gpt", "layers": 2, "hidden": 32, "heads": 4, "vocab_size": 257, "dropout": 0.1}
Write = Callable[..., Path]


@pytest.fixture
def spec(write_spec: Write) -> Path:
    """8 sequences of 32 in micro-batches of 2; saved every 5 steps, evaluated every 4."""
    return write_spec(
        model=MODEL,
        data={"train": str(_corpus_of(write_spec)), "seq_len": 32, "split": [90, 10, 0]},
        train={"global_batch": 8, "steps": STEPS},
        parallel={"micro_batch": 2},
        eval={"every": 4, "batches": 1},
        checkpoint={"every": 5, "keep": 2, "mode": "sync"},
    )


def _corpus_of(write_spec: Write) -> str:
    import yaml

    return str(yaml.safe_load(write_spec().read_text())["data"]["train"])


def start(spec: Path, name: str, **environ: str) -> Popen:
    return Popen([*ARGOSY, "train", str(spec), f"name={name}", "--quiet"], cwd=spec.parent, env=os.environ | environ)


def outcome(run: Path) -> tuple[dict[int, tuple[float, float, float | None]], str]:
    """(loss, gradient norm and validation loss of each step; hash of the final weights and optimiser)"""
    metrics = {
        step: (r["loss"], r["grad_norm"], r.get("validation_loss"))
        for step, r in read_metrics(run / "metrics.jsonl").items()
    }
    final = run / "checkpoints" / f"step-{STEPS:08d}"
    files = sorted(final.glob("*.safetensors"))
    assert len(files) == 2
    return metrics, hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def kill_at(spec: Path, name: str, step: int, delay_s: float) -> None:
    """Start training and kill it (SIGKILL) `delay_s` after it logs `step`, and no more than two steps later."""
    process = start(spec, name, **held(step + 3, until=spec.parent / "never"))
    metrics = spec.parent / "runs" / name / "metrics.jsonl"
    while process.poll() is None and max((r.get("step", 0) for r in read_jsonl(metrics)), default=0) < step:
        time.sleep(0.005)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.wait()


def finish(spec: Path, name: str) -> Path:
    assert start(spec, name).wait(timeout=PATIENCE_S) == 0
    return spec.parent / "runs" / name


def test_killed_at_several_points_and_resumed_is_bit_equal(spec: Path) -> None:
    expected = outcome(finish(spec, "undisturbed"))
    rng = random.Random(0)
    # One run, killed again and again: before its first save, between saves, near the end. Within the two steps after each there is no
    # save, so that it does not matter how soon the kill comes.
    for step in (1, 7, 12, 21):
        kill_at(spec, "killed", step, rng.uniform(0, 0.1))
    run = finish(spec, "killed")
    assert outcome(run) == expected
    assert sorted(expected[0]) == list(range(1, STEPS + 1))
    assert [verify(path).progress.step for path in listed(run / "checkpoints")] == [STEPS, 20]
    assert not list((run / "checkpoints").glob(".*"))
    events = [(e["event"], e["step"]) for e in read_jsonl(run / "events.jsonl") if e["event"] in ("start", "resume")]
    assert events == [("start", 0), ("start", 0), ("resume", 5), ("resume", 10), ("resume", 20)]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_at_random_moments_many_times_is_bit_equal(spec: Path) -> None:
    expected = outcome(finish(spec, "undisturbed"))
    rng = random.Random(1)
    for round_number in range(25):
        name = f"killed-{round_number}"
        for _ in range(4):
            process = start(spec, name)
            time.sleep(rng.uniform(0.5, 8.0))
            process.kill()
            process.wait()
        assert outcome(finish(spec, name)) == expected


def test_signals_after_the_last_save_do_not_change_the_exit_code(spec: Path) -> None:
    """A storm of them, from the moment the save is announced to the end of the process."""
    process = start(spec, "stormed", **held(8, until=spec.parent / "told"))
    run = spec.parent / "runs" / "stormed"
    while len(list(read_jsonl(run / "metrics.jsonl"))) < 3:
        time.sleep(0.005)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    (spec.parent / "told").touch()
    while not any(event["event"] == "interrupted" for event in read_jsonl(run / "events.jsonl")):
        time.sleep(0.001)
        assert process.poll() is None
    for number in itertools.cycle((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)):
        if process.poll() is not None:
            break
        process.send_signal(number)
        time.sleep(0.001)
    assert process.returncode == EXIT_RESUMABLE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_polite_signal_saves_this_step_and_asks_to_be_run_again(spec: Path, number: int) -> None:
    process = start(spec, "stopped", **held(8, until=spec.parent / "told"))
    run = spec.parent / "runs" / "stopped"
    while len(list(read_jsonl(run / "metrics.jsonl"))) < 3:
        time.sleep(0.005)
        assert process.poll() is None
    process.send_signal(number)
    (spec.parent / "told").touch()
    assert process.wait(timeout=PATIENCE_S) == EXIT_RESUMABLE
    stopped_at = listed(run / "checkpoints")[0].name
    logged = max(read_metrics(run / "metrics.jsonl"))
    assert stopped_at == f"step-{logged:08d}"
    assert logged <= 8
    if number == signal.SIGTERM:
        assert outcome(finish(spec, "stopped")) == outcome(finish(spec, "undisturbed"))

"""Faults of checkpoints: half-written, changed, missing, of another version."""

from __future__ import annotations

import signal
from pathlib import Path

import orjson

from argosy.errors import EXIT_REFUSED
from faults.bench import SAVED_EVERY, STEPS, Bench, Outcome, Run
from faults.storage import preloaded


def _finish(bench: Bench, run: Run, expected_step: int, *named: str) -> Outcome:
    """Start the run again: it resumes from the expected step, reports the reason, and ends with the undisturbed result."""
    newest = STEPS // 2
    run.start("--nproc", "2")
    assert run.wait() == 0, run.said
    resumed = run.events("resume")[-1]
    assert resumed["step"] == expected_step
    assert all(name in str(resumed["notes"]) for name in named), resumed
    assert run.result() == bench.undisturbed()
    return Outcome("older one used, bit-equal", steps_lost=max(newest, expected_step) - expected_step)


def _largest(checkpoint: Path) -> Path:
    return max((file for file in checkpoint.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def flipped_byte(bench: Bench) -> Outcome:
    with bench.goes_on("flipped-byte") as run:
        file = _largest(run.checkpoints[0])
        _flip(file)
        return _finish(bench, run, SAVED_EVERY * 2, file.name)


def missing_file(bench: Bench) -> Outcome:
    with bench.goes_on("missing-file") as run:
        file = _largest(run.checkpoints[0])
        file.unlink()
        return _finish(bench, run, SAVED_EVERY * 2, file.name)


def missing_manifest(bench: Bench) -> Outcome:
    with bench.goes_on("missing-manifest") as run:
        (run.checkpoints[0] / "manifest.json").unlink()
        return _finish(bench, run, SAVED_EVERY * 2, run.checkpoints[0].name)


def two_corrupt(bench: Bench) -> Outcome:
    with bench.goes_on("two-corrupt") as run:
        for checkpoint in run.checkpoints[:2]:
            _flip(_largest(checkpoint))
        return _finish(bench, run, SAVED_EVERY)


def all_corrupt(bench: Bench) -> Outcome:
    """If no good checkpoint is left, the refusal lists them."""
    with bench.goes_on("all-corrupt") as run:
        names = [checkpoint.name for checkpoint in run.checkpoints]
        for checkpoint in run.checkpoints:
            _flip(_largest(checkpoint))
        run.start("--nproc", "2")
        assert run.wait() == EXIT_REFUSED
        assert run.said.count("error[checkpoint.corrupt]") == 1
        assert all(name in run.said for name in names)
        return Outcome("refused with the list, exit 2")


def other_version(bench: Bench) -> Outcome:
    """A checkpoint of an unknown format version is neither misread nor skipped for an older one."""
    with bench.goes_on("other-version") as run:
        file = run.checkpoints[0] / "manifest.json"
        manifest = orjson.loads(file.read_bytes())
        file.write_bytes(orjson.dumps(manifest | {"version": 99}))
        run.start("--nproc", "2")
        assert run.wait() == EXIT_REFUSED
        assert run.said.count("error[checkpoint.version]") == 1
        return Outcome("refused, checkpoint.version")


def killed_while_saving(bench: Bench) -> Outcome:
    """All processes are killed during a save. The partial save is never taken for a checkpoint, and is removed."""
    with preloaded(bench, "checkpoints") as (env, orders), bench.run("killed-saving", env=env) as run:
        run.wait_step(SAVED_EVERY + 1)
        orders("slow 500")
        run.until(lambda: list((run.root / "checkpoints").glob(".*")), "a save in the making")
        step = run.newest()
        at = run.signal(signal.SIGKILL)
        run.wait()
        leftovers = list((run.root / "checkpoints").glob(".*"))
        orders("")
        run.start("--nproc", "2", env=env)
        assert run.wait() == 0, run.said
        assert leftovers
        assert not list((run.root / "checkpoints").glob(".*"))
        assert run.result() == bench.undisturbed()
        resumed = run.events("resume")[-1]
        return Outcome("next start bit-equal", recovered_s=resumed["time"] - at, steps_lost=step - resumed["step"])

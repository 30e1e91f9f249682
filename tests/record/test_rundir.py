"""A run directory holds one run and one trainer at a time, and refuses to become another run."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from argosy.config.resolve import resolve
from argosy.config.start import model_root
from argosy.errors import ArgosyError
from argosy.record import rundir
from argosy.record.rundir import RunDir

Write = Callable[..., Path]
FACTS = {"corpora": [{"documents": 40, "tokens": 999, "sha256": "abc"}], "eod_id": 256}
MACHINE = {"torch": "2.13.0", "device": "NVIDIA H200", "flash-attn-4": None}


def test_one_trainer_at_a_time_and_a_dead_one_does_not_count(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "x"
    code = f"from pathlib import Path; from argosy.record.rundir import RunDir\nr = RunDir(Path({str(root)!r})); r.open_for_training(); print('ready', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(ArgosyError) as refusal:
        RunDir(root).open_for_training()
    assert refusal.value.code == "run.busy"
    holder.kill()
    holder.wait()
    run = RunDir(root)
    run.open_for_training()
    run.close()


def test_a_watcher_that_looks_at_the_lock_does_not_refuse_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, waits = RunDir(tmp_path), []
    with (tmp_path / ".lock").open("w") as watcher:
        # As `is_held` does, paused before it closes the file. It goes on when the trainer waits for the second time.
        fcntl.flock(watcher, fcntl.LOCK_SH)
        wait = lambda seconds: waits.append(seconds) or len(waits) < 2 or watcher.close()  # noqa: E731
        # A clock of the lock's own: other threads sleep too, and a busy machine may take longer than the trainer waits.
        monkeypatch.setattr(rundir, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=wait))
        run.open_for_training()
    assert len(waits) == 2
    with pytest.raises(ArgosyError, match="another process is training"):
        RunDir(tmp_path).open_for_training()
    run.close()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgosyError) as refusal:
        RunDir(tmp_path / "file" / "run").open_for_training()
    assert refusal.value.code == "run.unwritable"


@pytest.fixture
def stored(write_spec: Write, tmp_path: Path) -> tuple[RunDir, Path]:
    path = write_spec()
    run = RunDir(tmp_path / "runs" / "tiny")
    run.open_for_training()
    run.store(resolve(path), path.read_text(), FACTS, MACHINE)
    return run, path


@pytest.mark.parametrize(
    "change", ["train.steps=50", "checkpoint.every=7", "eval=off", "optim.lr=1e-5", "parallel.micro_batch=2"]
)
def test_what_does_not_touch_past_steps_may_change(stored: tuple[RunDir, Path], change: str) -> None:
    run, path = stored
    changes = run.compare(resolve(path, [change]), FACTS, MACHINE)
    assert any(change.split("=")[0] in line for line in changes)


@pytest.mark.parametrize(
    "change", ["model.layers=3", "train.seed=2", "data.seq_len=16", "train.global_batch=4", "data.split=[80,20,0]"]
)
def test_what_would_make_it_another_run_is_refused(stored: tuple[RunDir, Path], change: str) -> None:
    run, path = stored
    with pytest.raises(ArgosyError) as refusal:
        run.compare(resolve(path, [change]), FACTS, MACHINE)
    assert refusal.value.code == "run.changed"
    assert change.split("=")[0] in refusal.value.cause


def test_data_may_move_but_not_change(stored: tuple[RunDir, Path]) -> None:
    run, path = stored
    assert run.compare(resolve(path, ["data.train=elsewhere"]), FACTS, MACHINE)
    other = {"corpora": [FACTS["corpora"][0] | {"sha256": "def"}], "eod_id": 256}
    with pytest.raises(ArgosyError) as refusal:
        run.compare(resolve(path), other, MACHINE)
    assert "sha256" in refusal.value.cause


def test_what_computes_a_run_may_change_and_is_told(stored: tuple[RunDir, Path]) -> None:
    run, path = stored
    assert run.compare(resolve(path), FACTS, MACHINE | {"flash-attn-4": "4.0"}) == ["machine.flash-attn-4: None -> 4.0"]
    assert run.compare(resolve(path), FACTS, MACHINE) == run.compare(resolve(path), FACTS, None) == []
    document = orjson.loads(run.resolved_file.read_bytes())
    # Older runs did not record the machine.
    del document["machine"]
    run.resolved_file.write_bytes(orjson.dumps(document))
    assert run.compare(resolve(path), FACTS, MACHINE) == []


@pytest.mark.parametrize("content", [b"", b"{}", b'{"spec": {}, "data": {}}', b'{"spec": [], "data": {}}', b"\xff"])
def test_a_damaged_record_of_the_spec_is_refused(stored: tuple[RunDir, Path], content: bytes) -> None:
    run, _ = stored
    run.resolved_file.write_bytes(content)
    with pytest.raises(ArgosyError) as refusal:
        run.load_spec()
    assert refusal.value.code == "run.damaged"


def test_a_directory_that_was_moved_away_is_not_written_to(stored: tuple[RunDir, Path]) -> None:
    run, _ = stored
    run.require_ours()
    run.root.rename(run.root.with_name("moved"))
    run.root.mkdir()
    with pytest.raises(ArgosyError):
        run.require_ours()


def test_a_run_goes_on_that_was_stored_before_a_key_existed(stored: tuple[RunDir, Path]) -> None:
    run, path = stored
    document = orjson.loads(run.resolved_file.read_bytes())
    for section, key in (
        ("model", "norm_centred"),
        ("model", "embed_scale"),
        ("model", "global_every"),
        ("data", "task"),
    ):
        del document["spec"][section][key]
    run.resolved_file.write_bytes(orjson.dumps(document))
    assert run.compare(resolve(path), FACTS, MACHINE) == []
    with pytest.raises(ArgosyError, match="embed_scale"):
        run.compare(resolve(path, ["model.embed_scale=true"]), FACTS, MACHINE)


def test_a_stored_spec_reads_back_equal(stored: tuple[RunDir, Path]) -> None:
    run, path = stored
    assert run.load_spec() == resolve(path).spec


def test_a_wrong_path_is_refused_with_the_runs_that_are_there(stored: tuple[RunDir, Path]) -> None:
    run, _ = stored
    with pytest.raises(ArgosyError) as refusal:
        model_root(run.root.with_name("tinny"))
    assert "tiny" in refusal.value.fix


def test_an_earlier_run_is_moved_never_deleted(stored: tuple[RunDir, Path]) -> None:
    run, _ = stored
    first = run.archive()
    run.open_for_training()
    second = run.archive()
    assert first != second
    assert (first / "resolved.json").exists()


def test_a_long_value_is_shortened_where_a_change_is_told(stored: tuple[RunDir, Path]) -> None:
    run, path = stored
    (change,) = run.compare(resolve(path, [f"log.sinks.wandb={'x' * 50_000}"]), FACTS, MACHINE)
    assert "characters left out" in change
    with pytest.raises(ArgosyError) as refusal:
        run.compare(resolve(path, [f"data.tokenizer={'x' * 50_000}", "train.seed=7"]), FACTS, MACHINE)
    assert len(str(refusal.value)) < 2_000

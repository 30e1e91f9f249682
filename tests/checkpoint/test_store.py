"""Checkpoints are complete or absent, are loaded only if their hashes are right, and hold nothing that can run."""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from argosy import files
from argosy.checkpoint import save as saving
from argosy.checkpoint import store
from argosy.checkpoint.manifest import VERSION, Checkpoint, TrainProgress, verify
from argosy.checkpoint.save import save
from argosy.checkpoint.store import latest, listed, prune
from argosy.checkpoint.tensors import TensorFile, read_tensors, require_finite, write_tensors
from argosy.errors import ArgosyError
from argosy.parallel.host_group import HostGroup
from argosy.parallel.shards import Box


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((3, 4), value), "b": torch.arange(5, dtype=torch.float32) * value}


def save_step(root: Path, step: int, keep: int = 10) -> Path:
    path = save(root, TrainProgress(step, step * 8), tensors(step), tensors(-step))
    prune(root, keep, newest=step)
    return path


def newest(root: Path) -> Checkpoint | None:
    return latest(root, report=lambda text: None)


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    save_step(tmp_path, 7)
    found = newest(tmp_path)
    assert found is not None
    assert found.progress == TrainProgress(7, 56)
    for name, tensor in tensors(7).items():
        assert torch.equal(found.weights()[name], tensor)
        assert torch.equal(found.optimizer()[name], -tensor)


@pytest.mark.parametrize("copies", [False, True])
def test_a_checkpoint_that_is_pruned_while_it_is_read_is_no_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    save_step(tmp_path, 1)
    steps, told = iter((2, 3)), list[str]()
    monkeypatch.setattr(store, "copies_to_rename", lambda path: copies)

    def verify_late(path: Path, hosts: HostGroup) -> Checkpoint:
        for step in steps:
            # Training goes on, and keeps one.
            save_step(tmp_path, step, keep=1)
            break
        return verify(path, hosts)

    monkeypatch.setattr(store, "verify", verify_late)
    found = latest(tmp_path, report=told.append)
    assert found is not None
    assert (found.progress.step, told) == (3, [])


def test_where_a_rename_copies_a_checkpoint_is_committed_by_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"36 35 {os.major(device)}:{os.minor(device)} / /data rw - fuse.blobfuse2 blobfuse2 rw,allow_other\n"
    )
    monkeypatch.setattr(files, "_MOUNTS", mounts)
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("a directory was renamed, which copies every file"))
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        save_step(root, step)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(saving, "finish", dies)
        with pytest.raises(KeyboardInterrupt):
            save_step(root, 3)
    assert (root / "step-00000003").is_dir()
    assert [path.name for path in listed(root)] == ["step-00000002", "step-00000001"], "one without a manifest is none"
    save_step(root, 3, keep=1)
    found = newest(root)
    assert found is not None
    assert found.progress.step == 3
    assert [path.name for path in root.iterdir()] == ["step-00000003"], "what is left of others is gone"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_files_are_plain_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    content = {
        "x": torch.randn(3, 5).to(dtype).t(),
        "empty": torch.empty(0, 2, dtype=dtype),
        "one": torch.ones((), dtype=dtype),
    }
    write_tensors(tmp_path / "t.safetensors", content)
    found = load_file(tmp_path / "t.safetensors")
    assert all(torch.equal(found[name], tensor) and found[name].dtype == dtype for name, tensor in content.items())


def test_the_newest_is_found_by_number_and_unfinished_ones_do_not_count(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save_step(tmp_path, step)
    (tmp_path / ".step-00000200.partial").mkdir()
    (tmp_path / "step-later").mkdir()
    found = newest(tmp_path)
    assert found is not None
    assert found.progress.step == 100
    assert [path.name for path in listed(tmp_path)] == ["step-00000100", "step-00000010", "step-00000009"]


def test_only_the_newest_are_kept_and_leftovers_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.partial").mkdir()
    for step in range(1, 6):
        save_step(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    prune(tmp_path, keep=1, newest=5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_retention_never_counts_or_keeps_a_bad_one_in_place_of_a_good_one(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save_step(tmp_path, step)
    _flip(tmp_path / "step-00000006" / "weights.safetensors", -1)
    found = latest(tmp_path, report=lambda text: None, set_aside=True)
    assert found is not None
    assert found.progress.step == 4
    save_step(tmp_path, 5, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad-step-00000006.1", "step-00000005"]
    assert newest(tmp_path) is not None


def test_a_newer_checkpoint_does_not_cost_the_one_just_written(tmp_path: Path) -> None:
    save_step(tmp_path, 9)
    save_step(tmp_path, 3, keep=1)
    assert (tmp_path / "step-00000003").exists()


def test_no_checkpoint_at_all_is_no_error(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing") is None


Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "flipped byte": lambda c: _flip(c / "weights.safetensors", -3),
    "flipped header": lambda c: _flip(c / "optimizer.safetensors", 12),
    "truncated": lambda c: (c / "weights.safetensors").write_bytes((c / "weights.safetensors").read_bytes()[:-1]),
    "file missing": lambda c: (c / "optimizer.safetensors").unlink(),
    "state changed": lambda c: (c / "state.json").write_bytes((c / "state.json").read_bytes().replace(b"2", b"3")),
    "manifest missing": lambda c: (c / "manifest.json").unlink(),
    "manifest cut": lambda c: (c / "manifest.json").write_bytes((c / "manifest.json").read_bytes()[:-9]),
    "manifest of no version": lambda c: _edit(c, version=0),
    "manifest of another step": lambda c: _edit(c, step=9),
    "manifest without files": lambda c: _edit(c, files={}),
    "path upwards": lambda c: _edit(c, files={"../../secret.json": {"bytes": 1, "blake3": "0" * 64}}),
    "absolute path": lambda c: _edit(c, files={"/etc/passwd": {"bytes": 1, "blake3": "0" * 64}}),
    "symbolic link": lambda c: _link(c / "weights.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: Damage) -> None:
    save_step(tmp_path, 1)
    bad = save_step(tmp_path, 2)
    damage(bad)
    reports: list[str] = []
    found = latest(tmp_path, reports.append)
    assert found is not None
    assert found.progress.step == 1
    assert "step-00000002" in reports[0]


def test_if_all_are_damaged_the_run_does_not_start_over_silently(tmp_path: Path) -> None:
    for step in (1, 2):
        _flip(save_step(tmp_path, step) / "weights.safetensors", -1)
    with pytest.raises(ArgosyError) as refusal:
        newest(tmp_path)
    assert refusal.value.code == "checkpoint.corrupt"
    assert "step-00000001" in refusal.value.cause
    assert "step-00000002" in refusal.value.cause


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_change_to_any_byte_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("fuzz")
    path = save_step(root, 3)
    file = path / data.draw(st.sampled_from(["weights.safetensors", "optimizer.safetensors", "state.json"]))
    _flip(file, data.draw(st.integers(0, file.stat().st_size - 1)))
    with pytest.raises(ArgosyError):
        verify(path)


def test_a_checkpoint_of_the_first_format_is_still_read(tmp_path: Path) -> None:
    path = save_step(tmp_path, 5)
    state = json.loads((path / "state.json").read_text())
    del state["about"]
    (path / "state.json").write_text(json.dumps(state))
    names = ("weights.safetensors", "optimizer.safetensors", "state.json")
    contents = {name: (path / name).read_bytes() for name in names}
    files = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in contents.items()}
    _edit(path, version=1, files=files)
    assert torch.equal(verify(path).weights()["b"], tensors(5)["b"])
    _flip(path / "weights.safetensors", -1)
    with pytest.raises(ArgosyError, match="SHA256"):
        verify(path)


def test_a_checkpoint_of_a_newer_format_is_neither_read_nor_passed_over(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    _edit(save_step(tmp_path, 2), version=VERSION + 1)
    with pytest.raises(ArgosyError) as refusal:
        latest(tmp_path, report=print, set_aside=True)
    assert refusal.value.code == "checkpoint.version"
    assert len(listed(tmp_path)) == 2


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(1, 6)), max_size=4), st.integers(1, 200))
def test_any_box_of_a_stored_tensor_is_read_alone(
    tmp_path_factory: pytest.TempPathFactory, dims: list[tuple[int, int, int]], least: int
) -> None:
    shape = tuple(size for size, _, _ in dims)
    box = Box(
        tuple(min(at, size - 1) for size, at, _ in dims),
        tuple(min(n, size - min(at, size - 1)) for size, at, n in dims),
    )
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    path = tmp_path_factory.mktemp("boxes") / "t.safetensors"
    write_tensors(path, {"other": torch.ones(3), "t": tensor})
    with (
        patch("argosy.checkpoint.tensors._LEAST_READ", least),
        patch("argosy.checkpoint.tensors._MOST_READ", 2 * least),
    ):
        assert torch.equal(TensorFile(path).read_box("t", box), tensor[box.slices])


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\x80\x04\x95 pickled")
    with pytest.raises(ArgosyError) as refusal:
        read_tensors(tmp_path / "x.safetensors")
    assert refusal.value.code == "checkpoint.corrupt"


def test_a_save_that_does_not_fit_leaves_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        with pytest.raises(ArgosyError) as refusal:
            save_step(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert refusal.value.code == "checkpoint.save-failed"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)


def _edit(checkpoint: Path, **changes: object) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


@pytest.mark.parametrize("number", [1e300, -4e38])
def test_numbers_beyond_32_bit_floats_are_refused_as_weights(number: float) -> None:
    with pytest.raises(ArgosyError, match="the largest number of"):
        require_finite("w", torch.tensor([1.0, number], dtype=torch.float64), "megatron.bad-files")
    assert require_finite("w", torch.tensor([3e38], dtype=torch.float64), "megatron.bad-files").dtype == torch.float64

"""Compiled kernels are kept where the environment says, unless another user could put libraries there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from argosy.config.schema import TrainSpec
from argosy.train import device, kernel_caches
from argosy.train.kernel_caches import VARIABLES, own_kernel_caches

STRANGER = os.geteuid() + 1


@pytest.fixture
def owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory where everybody can write, such as /tmp."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(kernel_caches.tempfile, "tempdir", str(temporary))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return shared


@pytest.mark.parametrize("umask", [0o022, 0o002])
def test_a_directory_is_made_for_this_user_alone_and_used_again(
    umask: int, owned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = {name: owned / "mine" / name.lower() for name in VARIABLES}
    for name, cache in caches.items():
        monkeypatch.setenv(name, str(cache))
    before = os.umask(umask)
    try:
        for _ in range(2):
            own_kernel_caches()
            assert {name: os.environ[name] for name in VARIABLES} == {n: str(cache) for n, cache in caches.items()}
    finally:
        os.umask(before)
    assert all(made.stat().st_mode & 0o077 == 0 for made in (owned / "mine", *caches.values()))


def test_without_the_variables_nothing_is_made(owned: Path) -> None:
    own_kernel_caches()
    assert not list(owned.iterdir())
    assert not any(name in os.environ for name in VARIABLES)


def test_they_are_looked_at_before_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(device, "own_kernel_caches", lambda: looked.append("caches"))
    monkeypatch.setattr(device, "_own_gpu", lambda local_rank: looked.append("gpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = TrainSpec(global_batch=1, deterministic=False)
    device.prepare_device(spec, "cpu")
    assert not looked
    device.prepare_device(spec, "cuda", local_rank=0)
    assert looked == ["caches", "gpu"]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories that belong to another user."""
    owners: list[Path] = []
    owner = kernel_caches._owner
    monkeypatch.setattr(kernel_caches, "_owner", lambda path: STRANGER if path in owners else owner(path))
    return owners


@pytest.mark.parametrize("whose", ["the directory", "its parent", "the target of a link"])
def test_what_a_stranger_can_have_made_is_not_used(
    whose: str, owned: Path, theirs: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "argosy")
    cache = owned / "argosy-1000" if whose == "the directory" else owned / "argosy-1000" / "triton"
    real = owned / "elsewhere" if whose == "the target of a link" else cache
    real.mkdir(parents=True)
    if real != cache:
        cache.parent.mkdir()
        cache.symlink_to(real)
    theirs.append(cache.parent if whose == "its parent" else real)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    own_kernel_caches()
    used = Path(os.environ["TRITON_CACHE_DIR"])
    assert used.is_dir()
    assert used not in (cache, real)
    assert used.stat().st_mode & 0o077 == 0
    assert f"{theirs[0]} belongs to another user ({STRANGER})" in caplog.text
    assert "compiled anew" in caplog.text


def test_a_directory_where_everybody_can_write_is_not_used(
    owned: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(owned))
    own_kernel_caches()
    assert os.environ["TRITON_CACHE_DIR"] != str(owned)
    assert f"everybody can write to {owned}" in caplog.text


def test_directories_of_people_whom_the_user_trusts_are_used(
    tmp_path: Path, owned: Path, theirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project's, where others cannot write; and root's, which has another number in some containers."""
    project, roots = tmp_path / "project" / "me" / "triton", owned / "image"
    project.mkdir(parents=True)
    roots.mkdir()
    theirs += [tmp_path / "project", roots, Path("/")]
    for cache in (project, roots):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
        own_kernel_caches()
        assert os.environ["TRITON_CACHE_DIR"] == str(cache)


@pytest.mark.parametrize("obstacle", ["a file", "a link to nothing", "a read-only disk"])
def test_a_directory_that_cannot_be_written_is_replaced(
    obstacle: str, owned: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "argosy")
    blocked = owned / "blocked"
    if obstacle == "a file":
        blocked.touch()
    elif obstacle == "a read-only disk":
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    else:
        blocked.symlink_to(owned / "missing" / "nothing")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(blocked))
    own_kernel_caches()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] != str(blocked)
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_dir()
    assert f"TORCHINDUCTOR_CACHE_DIR is not used: {blocked}" in caplog.text

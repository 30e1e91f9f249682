"""A small file is replaced whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from argosy import files
from argosy.files import replace_file


def test_a_full_disk_names_the_file_keeps_the_old_one_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "facts.json"
    replace_file(path, b"old")
    (tmp_path / "full").symlink_to("/dev/full")
    monkeypatch.setattr(files, "_temporary_path", lambda path: tmp_path / "full")
    with pytest.raises(OSError, match="No space left") as failed:
        replace_file(path, b"new" * 10_000)
    assert failed.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["facts.json"]


def test_two_who_replace_a_file_at_once_do_not_write_into_each_others_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = tmp_path / "facts.json", os.replace

    def overtaken(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        replace_file(path, b"of the second")
        assert path.read_bytes() == b"of the second"
        replace(source, target)

    monkeypatch.setattr(os, "replace", overtaken)
    replace_file(path, b"of the first")
    assert path.read_bytes() == b"of the first"
    assert os.listdir(tmp_path) == ["facts.json"]

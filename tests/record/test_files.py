"""A small file is replaced whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from argosy.record.files import replace_file


def test_a_full_disk_names_the_file_keeps_the_old_one_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    replace_file(path, b"old")
    (tmp_path / f".facts.json.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as failed:
        replace_file(path, b"new" * 10_000)
    assert failed.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["facts.json"]

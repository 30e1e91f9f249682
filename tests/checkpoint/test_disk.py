"""Files written with direct I/O have the right bytes, size and hash on any file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from argosy.checkpoint import disk

BLOCK = 2 * disk._SECTOR


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


def require_written(path: Path, parts: list[bytes]) -> None:
    with patch.object(disk, "_BLOCK", BLOCK):
        written = disk.write_bytes(path, parts[0], map(memoryview, parts[1:]))
    whole = b"".join(parts)
    assert path.read_bytes() == whole
    assert written == disk.Written(len(whole), blake3(whole).hexdigest())


@given(st.lists(st.sampled_from([0, 1, 8, disk._SECTOR, BLOCK - 8, BLOCK, 3 * BLOCK + 5]), min_size=1, max_size=6))
def test_what_is_written_is_what_was_given(directory: Path, sizes: list[int]) -> None:
    require_written(directory / "file", [bytes([i + 1]) * size for i, size in enumerate(sizes)])


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_without_direct_writes_is_written_through_the_cache(tmp_path: Path, refused: str) -> None:
    """FUSE and older network file systems refuse O_DIRECT when the file is opened, or at the first write."""
    really, calls = getattr(os, refused), []

    def no_direct(target: Any, *arguments: Any) -> Any:
        flags = arguments[0] if refused == "open" else disk.fcntl.fcntl(target, disk.fcntl.F_GETFL)
        calls.append(flags & os.O_DIRECT)
        if calls[-1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really(target, *arguments)

    with patch.object(disk.os, refused, no_direct):
        require_written(tmp_path / "file", [b"x" * 100, b"y" * (2 * BLOCK)])
    assert calls[0]
    assert not any(calls[1:])


def test_another_fault_is_not_taken_for_that(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        disk.write_bytes(Path("/dev/full"), b"x" * disk._SECTOR, ())

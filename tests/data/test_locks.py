"""Locks of pieces of work: one that another machine cannot see, or that was not granted, is not relied on."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from argosy.data.prepare import piece_queue
from argosy.data.prepare.locks import PieceLocks
from argosy.data.prepare.piece_queue import PieceQueue


@pytest.mark.parametrize(
    ("mount", "kept"),
    [
        ("ext4 /dev/sda1 rw", True),
        ("nfs4 server:/data rw,vers=4.2,local_lock=none", True),
        ("nfs server:/data rw,vers=3,local_lock=flock", True),
        ("nfs server:/data rw,vers=3,nolock,local_lock=all", False),
        ("nfs server:/data rw,vers=3,local_lock=posix", False),
        ("lustre 10.0.0.1@tcp:/data rw,localflock", False),
        ("fuse blobfuse2 rw,user_id=0", False),
        ("fuse.gcsfuse bucket rw,user_id=0", False),
    ],
)
def test_locks_that_other_machines_do_not_see_are_not_kept_but_exclude_processes_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, kept: bool
) -> None:
    device, read_text = tmp_path.stat().st_dev, Path.read_text
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw,noatime shared:1 - {mount}\n"
    monkeypatch.setattr(
        Path, "read_text", lambda self, **k: line if str(self) == "/proc/self/mountinfo" else read_text(self, **k)
    )
    locks = PieceLocks(tmp_path / "locks")
    assert locks.are_kept == kept
    assert locks.take(3)
    other = os.fork()
    if not other:
        os._exit(int(PieceLocks(tmp_path / "locks").take(3)))
    assert os.waitpid(other, 0)[1] == 0
    locks.release(3)
    locks.close()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ESTALE, errno.EIO])
def test_an_error_is_no_lock_where_the_file_system_has_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    locks = PieceLocks(tmp_path / "locks")

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        locks.take(0)
    # Where there is none from the start, every lock is granted.
    without = PieceLocks(tmp_path / "locks")
    assert without.take(0)
    without.release(0)


def test_a_wait_for_another_process_is_told_again_and_again_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(piece_queue, "_SAY_S", 0.001)

    def queue() -> PieceQueue:
        return PieceQueue(PieceLocks(tmp_path / "locks"), 1, "pieces", {7: tmp_path / "piece"}, lambda: False)

    (held, hold), (ended, end) = os.pipe(), os.pipe()
    other = os.fork()
    if not other:
        taken = list(queue().take([7]))
        os.write(hold, b"x")
        os.read(ended, 1)
        os._exit(len(taken) != 1)
    os.read(held, 1)
    told: list[str] = []

    class End(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            if len(told) == 3:
                os.write(end, b"x")

    logger = logging.getLogger(piece_queue.__name__)
    logger.addHandler(handler := End())
    try:
        with caplog.at_level(logging.INFO, logger.name):
            queue().wait([7])
    finally:
        logger.removeHandler(handler)
    assert os.waitpid(other, 0)[1] == 0
    assert set(told) == {f"other processes have the last 1 of 1 pieces; waiting for {tmp_path / 'piece'}"}

"""Locks that let one process at a time make a shard, on any machine.

A process that finds its shards locked waits until the other process ends, and resumes from there. That happens when a pod is
recreated while the old pod still runs. The locks are byte ranges of one file, one byte per shard or other piece of work. The
kernel releases them with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_BUSY = (errno.EACCES, errno.EAGAIN)
# The byte that every process of a job locks for reading.
_PRESENT = 1 << 62


class PieceLocks:
    """The locks of one process on numbered pieces of a job, such as its shards.

    Args:
        file: The file of the locks, which all processes of the job open.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # False on a file system without locks. Then every lock is granted.
        self.are_kept = True
        try:
            # A process that works without a lock of a piece is known to others by this one.
            fcntl.lockf(self._fd, fcntl.LOCK_SH, 1, _PRESENT)
        except OSError:
            self.are_kept = False

    def take(self, piece: int, *, wait: bool = False) -> bool:
        """Lock a piece. Return False if another process holds it and `wait` is False."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, piece)
        except OSError as error:
            return error.errno not in _BUSY
        return True

    def take_all(self, pieces: Iterable[int], report: Callable[[str], None]) -> None:
        """Lock all pieces, and wait for those that another process holds."""
        told = False
        # Every process locks in the same order, which prevents deadlock.
        for piece in sorted(pieces):
            if self.take(piece):
                continue
            if not told:
                report(f"another process is preparing shards of {self._file.parent.parent}; waiting for it to end")
            told = True
            self.take(piece, wait=True)

    def release(self, piece: int) -> None:
        """Unlock a piece."""
        if self.are_kept:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, piece)

    def is_current(self) -> bool:
        """Return True if the file is still there, and was not removed while this process waited for a lock."""
        try:
            return os.path.samestat(os.fstat(self._fd), self._file.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Release all locks."""
        os.close(self._fd)


@contextlib.contextmanager
def locked(file: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a whole file, which conflicts with every process that has `PieceLocks` of it. Yield False if another process holds one and `wait` is False.

    On a file system without locks nothing is locked.
    """
    fd, free = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), True
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            free = error.errno not in _BUSY
        yield free
    finally:
        os.close(fd)

"""Locks that let one process at a time make a shard, on any machine.

A process that finds its shards locked waits until the other process ends, and resumes from there. That happens when a pod is
recreated while the old pod still runs. The locks are byte ranges of one file, one byte per shard or other piece of work. The
kernel releases them with the process.

Some file systems grant locks that other machines do not see: FUSE without a lock handler, which is every common mount of an object
store, and network file systems mounted with local locks. Those locks exclude processes of the same machine only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from argosy.files import mounts_of

_BUSY = (errno.EACCES, errno.EAGAIN)
# The byte that every process of a job locks for reading.
_PRESENT = 1 << 62
# Mount options of NFS, Lustre and CIFS with which a machine keeps the locks of byte ranges to itself.
_LOCAL = {"nolock", "local_lock=all", "local_lock=posix", "localflock", "nobrl"}


class PieceLocks:
    """The locks of one process on numbered pieces of a job, such as its shards.

    Args:
        file: The file of the locks, which all processes of the job open.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # False if processes of other machines may be granted the same lock. On a file system without locks every lock is granted.
        self.are_kept = _are_seen_elsewhere(self._fd)
        try:
            # A process that works without a lock of a piece is known to others by this one.
            fcntl.lockf(self._fd, fcntl.LOCK_SH, 1, _PRESENT)
        except OSError:
            self.are_kept = False

    def take(self, piece: int, *, wait: bool = False) -> bool:
        """Lock a piece. Return False if another process holds it and `wait` is False.

        Raises:
            OSError: The file system has locks, but did not answer whether this one is free.
        """
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, piece)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            if self.are_kept:
                raise
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
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, piece)
        except OSError:
            if self.are_kept:
                raise

    def is_current(self) -> bool:
        """Return True if the file is still there, and was not removed while this process waited for a lock."""
        try:
            return os.path.samestat(os.fstat(self._fd), self._file.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Release all locks."""
        os.close(self._fd)


def _are_seen_elsewhere(fd: int) -> bool:
    """Return False if the mount of an open file is known to keep locks to one machine."""
    return not any(
        mount.kind.startswith("fuse") or not _LOCAL.isdisjoint(mount.options)
        for mount in mounts_of(os.fstat(fd).st_dev)
    )


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

"""Locks that let one process at a time make a shard, on any machine.

A process that finds its shards locked waits until the other process ends, and resumes from there. That happens when a pod is
recreated while the old pod still runs. The locks are byte ranges of one file, one byte per shard. The kernel releases them with
the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_BUSY = (errno.EACCES, errno.EAGAIN)


def lock_shards(file: Path, shards: Iterable[int], report: Callable[[str], None]) -> int:
    """Lock the shards. Return a file descriptor that holds the locks until it is closed.

    On a file system without locks nothing is locked.
    """
    fd, told = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), False
    # Every process locks in the same order, which prevents deadlock.
    for shard in sorted(shards):
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, shard)
        except OSError as error:
            if error.errno not in _BUSY:
                break
            if not told:
                report(f"another process is preparing shards of {file.parent.parent}; waiting for it to end")
            told = True
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, shard)
    return fd


@contextlib.contextmanager
def locked(file: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a whole file, which conflicts with the lock of any shard. Yield False if another process holds one and `wait` is False.

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


def is_current(fd: int, file: Path) -> bool:
    """Return True if `file` still names the open file, and was not removed while this process waited for the lock."""
    try:
        return os.path.samestat(os.fstat(fd), file.stat())
    except OSError:
        return False

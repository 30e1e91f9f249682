"""One process at a time makes a shard, wherever it runs. A start that finds another at work on shards of its own, as a pod does
that was made anew while the old one still lived, waits for it to end, however it ends, and goes on from there.

The locks are on bytes of one file, one for each shard. The kernel gives them up with the process.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable
from pathlib import Path

_BUSY = (errno.EACCES, errno.EAGAIN)


def lock_shards(file: Path, shards: Iterable[int], report: Callable[[str], None]) -> int:
    """What holds the locks until it is closed. A file system that has no locks holds nobody up."""
    fd, told = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), False
    for shard in sorted(shards):  # in one order for all, so that no two wait for each other
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


def is_there(fd: int, file: Path) -> bool:
    """Whether it is still the file of that name, and not one that was removed while we waited for it."""
    try:
        return os.path.samestat(os.fstat(fd), file.stat())
    except OSError:
        return False

"""Helpers for files that processes share: list by pattern, open without following links, remove only if nobody holds the lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_FULL = (errno.ENOSPC, errno.EDQUOT)


def entries(directory: Path | str, name: re.Pattern[str], *, directory_wanted: bool) -> Iterator[os.DirEntry[str]]:
    """Yield the files, or the directories, whose name matches. Symbolic links are skipped."""
    with contextlib.suppress(OSError), os.scandir(str(directory)) as found:
        for entry in found:
            kind = entry.is_dir if directory_wanted else entry.is_file
            if name.fullmatch(entry.name) and kind(follow_symlinks=False):
                yield entry


def is_idle(path: str) -> bool:
    """Return True if no process holds a lock on the file."""
    try:
        fd = os.open(path, os.O_RDWR | FLAGS)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def unlink(path: str, lock: str | None = None) -> bool:
    """Remove a file, if nobody holds `lock`. Return True if this call removed it."""
    fd = -1
    try:
        if lock is not None:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(lock, os.O_RDWR | FLAGS)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not is_same(fd, lock):
                    return False
        os.unlink(path)
        return True
    except OSError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)


def is_same(fd: int, path: str) -> bool:
    """Return True if `path` still names the open file."""
    try:
        named, opened = os.stat(path, follow_symlinks=False), os.fstat(fd)
    except OSError:
        return False
    return (named.st_ino, named.st_dev) == (opened.st_ino, opened.st_dev)


def pread(fd: int, start: int, count: int) -> bytes:
    """Read `count` bytes at `start`, or fewer at the end of the file."""
    raw = os.pread(fd, count, start)
    while len(raw) < count and (more := os.pread(fd, count - len(raw), start + len(raw))):
        raw += more
    return raw


def _overwrite(fd: int, content: bytes) -> None:
    os.ftruncate(fd, 0)
    at = 0
    while at < len(content):
        at += os.pwrite(fd, memoryview(content)[at:], at)


def fits(fd: int, content: bytes) -> bool:
    """Overwrite a file. Return False, and leave it empty, if the disk is full."""
    try:
        _overwrite(fd, content)
        return True
    except OSError as error:
        if error.errno not in _FULL:
            raise
        os.ftruncate(fd, 0)
        return False


def file_sha256(path: Path) -> str | None:
    """Return the sha256 of a file, or None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None

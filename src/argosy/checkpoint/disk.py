"""Writing a file: hashed on the way, past the page cache, and synced.

What is written through the page cache is copied there, competes with the run for memory, and is thrown out to the disk whenever
the kernel thinks fit; a checkpoint is not read again for a long time. So whole blocks go straight to the disk, from memory
aligned as that asks for; the rest of a file, and all of it where a file system wants no such writes, goes through the cache.
One block is written while the next is filled and hashed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from argosy.checkpoint.hashing import new_digest

_BLOCK = 32 * 2**20  # bytes written at once
_SECTOR = 4096  # bytes, of which a write straight to a disk has to be a multiple
_DIRECT = getattr(os, "O_DIRECT", 0)  # not every system has it


class Written(NamedTuple):
    """A file as it should be found again."""

    bytes: int
    digest: str


def write_bytes(path: Path, header: bytes, parts: Iterable[memoryview]) -> Written:
    """A header and what follows it."""
    digest, size = new_digest(), 0
    writing: Future[None] | None = None
    with _opened(path) as file, ThreadPoolExecutor(1) as beside:
        for block in _blocks(chain([memoryview(header)], parts)):
            digest.update(block)
            size += len(block)
            if writing is not None:
                writing.result()
            writing = beside.submit(_put, file, block)
        if writing is not None:
            writing.result()
        os.fsync(file)
    return Written(size, digest.hexdigest())


def _blocks(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """All bytes of the parts in blocks of one size, the last of what is left. A block is overwritten by the second after it."""
    buffers = cycle([memoryview(mmap.mmap(-1, _BLOCK)) for _ in range(2)])
    buffer, filled = next(buffers), 0
    for part in parts:
        while len(part):
            count = min(len(part), len(buffer) - filled)
            # numpy lets other threads run while it copies; a memoryview does not.
            np.copyto(np.frombuffer(buffer, np.uint8, count, filled), np.frombuffer(part, np.uint8, count))
            part, filled = part[count:], filled + count
            if filled == len(buffer):
                yield buffer
                buffer, filled = next(buffers), 0
    if filled:
        yield buffer[:filled]


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A new, empty file, for writing straight to the disk where the file system can."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        file = os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        file = os.open(path, flags, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def _put(file: int, block: memoryview) -> None:
    if len(block) % _SECTOR:
        _through_cache(file)
    done = 0
    while done < len(block):
        try:
            done += os.write(file, block[done:])
        except OSError as error:
            if error.errno != errno.EINVAL or not _through_cache(file):
                raise


def _through_cache(file: int) -> bool:
    """Let the page cache take what is written from here on; False where it already does."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)

"""Writing a checkpoint file: hashed on the way, with direct I/O, and synced.

Writes through the page cache are copied, compete with the run for memory, and are flushed when the kernel decides; a
checkpoint is not read again for a long time. So whole blocks use O_DIRECT from page-aligned memory. The rest of a file, and
all of it where the file system does not support O_DIRECT, goes through the page cache. One block is written while the next is
filled and hashed.

The hash of a file, computed while it is written and again before it is loaded. BLAKE3 is as strong as SHA-256 and, on one
core, several times as fast as disks; older checkpoints have SHA-256.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, cycle
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from argosy.untrusted import open_regular

_BLOCK = 32 * 2**20  # bytes
# O_DIRECT writes must be a multiple of this many bytes.
_SECTOR = 4096
# 0 on systems without O_DIRECT.
_DIRECT = getattr(os, "O_DIRECT", 0)
# Threads of a rank that read files.
READERS = min(4, os.cpu_count() or 1)


class Written(NamedTuple):
    """The size and digest of a file that was written."""

    bytes: int
    digest: str


def write_bytes(path: Path, header: bytes, parts: Iterable[memoryview]) -> Written:
    """Write a header and the parts after it, sync the file, and return its size and digest."""
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
    """Yield all bytes of the parts in blocks of equal size; the last may be shorter. A block's buffer is reused two blocks
    later."""
    buffers = cycle([memoryview(mmap.mmap(-1, _BLOCK)) for _ in range(2)])
    buffer, filled = next(buffers), 0
    for part in parts:
        while len(part):
            count = min(len(part), len(buffer) - filled)
            # numpy releases the GIL while it copies; a memoryview does not.
            np.copyto(np.frombuffer(buffer, np.uint8, count, filled), np.frombuffer(part, np.uint8, count))
            part, filled = part[count:], filled + count
            if filled == len(buffer):
                yield buffer
                buffer, filled = next(buffers), 0
    if filled:
        yield buffer[:filled]


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a new, empty file for direct I/O if the file system supports it."""
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
    """Switch the file to writes through the page cache. Returns False if it was switched already."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)


_PIECE = 4 * 2**20  # bytes


class Digest(Protocol):
    def update(self, data: memoryview | bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


def new_digest(algorithm: str = "blake3") -> Digest:
    if algorithm == "sha256":
        return hashlib.sha256()
    from blake3 import blake3

    digest: Digest = blake3()
    return digest


def hash_file(path: Path, algorithm: str) -> str:
    digest, buffer = new_digest(algorithm), memoryview(bytearray(_PIECE))
    with open_regular(path, buffering=0) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:count])
    return digest.hexdigest()

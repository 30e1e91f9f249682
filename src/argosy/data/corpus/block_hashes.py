"""Hashes of the 256 KiB blocks of a shard, kept beside it, so that whoever reads some of its bytes can check those.

`NAME.blocks` holds 32 bytes of sha256 for each block of `NAME.bin`, then for each block of `NAME.idx`; its own sha256 is
in the manifest. A list in the manifest itself would be 100 MB of JSON for 400 GB of tokens.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 1 << 18  # bytes; the last block of a file may be shorter
DIGEST = 32

Bytes = bytes | memoryview | mmap.mmap


def blocks_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".blocks")


def blocks_of(size: int) -> int:
    """How many blocks a file of `size` bytes has."""
    return -(-size // BLOCK)


class BlockHasher:
    """Hashes the blocks of one file as its bytes are written."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._block: Any = hashlib.sha256()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            piece = data[at : at + BLOCK - self._filled]
            self._block.update(piece)
            self._filled += len(piece)
            at += len(piece)
            if self._filled == BLOCK:
                self._close()

    def finish(self) -> bytes:
        """The hashes of all blocks, one after the other."""
        if self._filled:
            self._close()
        return b"".join(self._done)

    def _close(self) -> None:
        self._done.append(self._block.digest())
        self._block, self._filled = hashlib.sha256(), 0


def wrong_blocks(digests: Bytes, first: int, content: Bytes) -> Iterator[int]:
    """The numbers of the blocks in `content`, which begins with block `first` of a file, that are not what they were."""
    view = memoryview(content)
    for at in range(0, len(view), BLOCK):
        number = first + at // BLOCK
        if hashlib.sha256(view[at : at + BLOCK]).digest() != digests[DIGEST * number : DIGEST * (number + 1)]:
            yield number

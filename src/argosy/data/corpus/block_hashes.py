"""Checksums of the 256 KiB blocks of a shard, stored beside it, so that a partial read can be verified.

`NAME.blocks` holds 32 bytes of sha256 for each block of `NAME.bin`, then for each block of `NAME.idx`. Its own sha256 is in
the manifest. A list in the manifest itself would be 100 MB of JSON for 400 GB of tokens.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The last block of a file may be shorter.
BLOCK = 1 << 18  # bytes
DIGEST = 32  # bytes

Bytes = bytes | memoryview | mmap.mmap


def blocks_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".blocks")


def blocks_of(size: int) -> int:
    """Return the number of blocks in a file of `size` bytes."""
    return -(-size // BLOCK)


class BlockHasher:
    """A hasher for the blocks of one file, fed as the file is written."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._block: Any = hashlib.sha256()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        """Hash the next bytes of the file."""
        at = 0
        while at < len(data):
            piece = data[at : at + BLOCK - self._filled]
            self._block.update(piece)
            self._filled += len(piece)
            at += len(piece)
            if self._filled == BLOCK:
                self._close()

    def finish(self) -> bytes:
        """Return the concatenated hashes of all blocks."""
        if self._filled:
            self._close()
        return b"".join(self._done)

    def _close(self) -> None:
        self._done.append(self._block.digest())
        self._block, self._filled = hashlib.sha256(), 0


def wrong_blocks(digests: Bytes, first: int, content: Bytes) -> Iterator[int]:
    """Yield the numbers of the blocks whose hash differs. `content` begins with block `first` of the file."""
    view = memoryview(content)
    for at in range(0, len(view), BLOCK):
        number = first + at // BLOCK
        if hashlib.sha256(view[at : at + BLOCK]).digest() != digests[DIGEST * number : DIGEST * (number + 1)]:
            yield number

"""The lines of a log worth searching, however long it is, and even if it is a pipe.

The log of a failed job is mostly step lines, or one message a million times. Of lines that differ only in their digits, only
the first 64 are kept.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# Bytes of one read. A longer line is cut.
_BLOCK = 4 << 20
# Bytes of a line that are compared with other lines.
_SHAPE = 160
# Lines kept of one shape; shapes in memory.
_ALIKE, _SHAPES = 64, 200_000


def suspects(path: Path, most_bytes: int, most_lines: int) -> list[str]:
    """Return at most `most_lines` lines of a log: the first third and the last two thirds.

    Of a file longer than `most_bytes`, only the start and the end are read.
    """
    first: list[bytes] = []
    last: deque[bytes] = deque(maxlen=most_lines - most_lines // 3)
    alike: Counter[bytes] = Counter()
    try:
        with path.open("rb") as file:
            for line in _lines(file, most_bytes):
                shape = line[:_SHAPE].translate(None, b"0123456789")
                # The shapes hardly repeat.
                if len(alike) > _SHAPES:
                    alike.clear()
                alike[shape] += 1
                if alike[shape] <= _ALIKE:
                    (first if len(first) < most_lines // 3 else last).append(line)
    except OSError:
        # The file was deleted or became unreadable. The lines read so far count.
        pass
    return [line.decode(errors="replace") for line in (*first, *last)]


def _lines(file: BinaryIO, most: int) -> Iterator[bytes]:
    rest = b""
    for block in _blocks(file, most):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
        if len(rest) > _BLOCK:
            rest = rest[:_BLOCK]
    yield rest


def _blocks(file: BinaryIO, most: int) -> Iterator[bytes]:
    """Yield a quarter of `most` bytes from the start and the rest from the end; of a pipe, whose end is unknown, all from the
    start."""
    size = file.seek(0, 2) if file.seekable() else None
    if size is not None:
        file.seek(0)
    left = most if size is None or size <= most else most // 4
    while left > 0 and (block := file.read(min(_BLOCK, left))):
        left -= len(block)
        yield block
    if size is not None and size > most:
        # Separates the start from the end.
        yield b"\n"
        file.seek(size - (most - most // 4))
        while block := file.read(_BLOCK):
            yield block

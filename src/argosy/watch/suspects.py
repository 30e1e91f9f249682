"""The lines of a log that are worth a look, however long it is and whether or not it can be read backwards.

A log of a failed job is mostly steps, or one complaint a million times over. Of lines that are the same but for their figures
only the first few are looked at.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BLOCK = 4 << 20  # bytes read at once; a longer line is cut
_SHAPE = 160  # bytes of a line by which it is told from others
_ALIKE, _SHAPES = 64, 200_000  # lines of one shape; shapes that are remembered


def suspects(path: Path, most_bytes: int, most_lines: int) -> list[str]:
    """Of a file or a pipe: a third of so many lines from its start, and the rest up to its end; of a file that is longer than
    so many bytes, its start and its end."""
    first: list[bytes] = []
    last: deque[bytes] = deque(maxlen=most_lines - most_lines // 3)
    alike: Counter[bytes] = Counter()
    try:
        with path.open("rb") as file:
            for line in _lines(file, most_bytes):
                shape = line[:_SHAPE].translate(None, b"0123456789")
                if len(alike) > _SHAPES:  # nothing is like anything else
                    alike.clear()
                alike[shape] += 1
                if alike[shape] <= _ALIKE:
                    (first if len(first) < most_lines // 3 else last).append(line)
    except OSError:
        pass  # it went away: what was read counts
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
    """A quarter of `most` from the start, and the end of the file; a pipe, whose end is not known, from the start."""
    size = file.seek(0, 2) if file.seekable() else None
    if size is not None:
        file.seek(0)
    left = most if size is None or size <= most else most // 4
    while left > 0 and (block := file.read(min(_BLOCK, left))):
        left -= len(block)
        yield block
    if size is not None and size > most:
        yield b"\n"  # between the two
        file.seek(size - (most - most // 4))
        while block := file.read(_BLOCK):
            yield block

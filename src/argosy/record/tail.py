"""A JSONL file read as it grows: whole lines from where the last read ended, however the file came to be there.

The place is a number of bytes, so that it can be kept and taken up by another process. A file that became shorter, or is
another one, was replaced, and is read from its start.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import orjson

from argosy.record.jsonl import Record
from argosy.untrusted import open_regular

_LONGEST_MARK = 4096  # bytes of a line, by which a file is known again: its number changes on some shared disks


class Kept:
    """The newest records of a growing file, in memory, each as `take` makes it once; None is left out."""

    def __init__(self, path: Path, most: int, take: Callable[[Record], Record | None]) -> None:
        self._tail, self._lock, self._take = Tail(path), threading.Lock(), take
        self._records: deque[Record] = deque(maxlen=most)

    def read(self) -> list[Record]:
        with self._lock:
            before, fresh = self._tail.offset, deque[Record](maxlen=self._records.maxlen)
            for record, _ in self._tail.read():
                if self._tail.offset <= before:  # replaced by a shorter file
                    self._records.clear()
                    fresh.clear()
                before = self._tail.offset
                fresh.append(record)
            self._records.extend(taken for record in fresh if (taken := self._take(record)) is not None)
            return list(self._records)


class Tail:
    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset
        self._mark = (0, b"")  # a place, and the line before it

    def read(self, limit: int = 1 << 30) -> Iterator[tuple[Record, int]]:
        """New records, each with the place behind it; `offset` moves along. A broken line is passed over, and one that is
        not finished yet is left for later."""
        try:
            file = open_regular(self.path, within=self.path.parent)
        except OSError:
            return
        with file:
            if file.seek(0, 2) < self.offset or not self._is_the_same(file):
                self.offset = 0
            file.seek(self.offset)
            while limit > 0 and (line := file.readline()).endswith(b"\n"):
                self.offset += len(line)
                self._mark = (self.offset, line[-_LONGEST_MARK:])
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue
                if isinstance(record, dict):
                    limit -= 1
                    yield record, self.offset

    def _is_the_same(self, file: BinaryIO) -> bool:
        place, line = self._mark
        if place != self.offset:  # somebody set it
            return True
        file.seek(place - len(line))
        return file.read(len(line)) == line

"""Reading a JSONL file as it grows: complete lines from the offset where the last read ended.

The offset is in bytes, so that it can be stored and used by another process. A file that became shorter, or whose last line
read is no longer in its place, was replaced, and is read from its start.
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

# Bytes of the last line read, by which a file is recognised. The inode number changes on some network file systems.
_LONGEST_MARK = 4096


class RecentRecords:
    """The newest records of a growing file, in memory. `take` converts each record once; None drops it."""

    def __init__(self, path: Path, most: int, take: Callable[[Record], Record | None]) -> None:
        self._tail, self._lock, self._take = Tail(path), threading.Lock(), take
        self._records: deque[Record] = deque(maxlen=most)

    def read(self) -> list[Record]:
        with self._lock:
            before, fresh = self._tail.offset, deque[Record](maxlen=self._records.maxlen)
            for record, _ in self._tail.read():
                # The file was replaced by a shorter one.
                if self._tail.offset <= before:
                    self._records.clear()
                    fresh.clear()
                before = self._tail.offset
                fresh.append(record)
            self._records.extend(taken for record in fresh if (taken := self._take(record)) is not None)
            return list(self._records)


class Tail:
    """A reader of a growing JSONL file, from byte `offset` on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset
        # An offset, and the line that ends there.
        self._mark = (0, b"")

    def read(self, limit: int = 1 << 30) -> Iterator[tuple[Record, int]]:
        """Yield at most `limit` new records, each with the offset after it, and advance `offset`.

        A broken line is skipped. An unfinished line is left for the next read.
        """
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
        # The caller has set `offset`.
        if place != self.offset:
            return True
        file.seek(place - len(line))
        return file.read(len(line)) == line

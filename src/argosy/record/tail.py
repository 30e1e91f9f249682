"""A JSONL file read as it grows: whole lines from where the last read ended, however the file came to be there.

The place is a number of bytes, so that it can be kept and taken up by another process. A file that became shorter was
replaced, and is read from its start.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import orjson

from argosy.record.jsonl import Record


class Kept:
    """The newest records of a growing file, in memory."""

    def __init__(self, path: Path, most: int) -> None:
        self._tail, self._lock = Tail(path), threading.Lock()
        self._records: deque[Record] = deque(maxlen=most)

    def read(self) -> list[Record]:
        with self._lock:
            before = self._tail.offset
            for record, _ in self._tail.read():
                if self._tail.offset <= before:  # replaced by a shorter file
                    self._records.clear()
                before = self._tail.offset
                self._records.append(record)
            return list(self._records)


class Tail:
    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def read(self, limit: int = 1 << 30) -> Iterator[tuple[Record, int]]:
        """New records, each with the place behind it; `offset` moves along. A broken line is passed over, and one that is
        not finished yet is left for later."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            if file.seek(0, 2) < self.offset:
                self.offset = 0
            file.seek(self.offset)
            while limit > 0 and (line := file.readline()).endswith(b"\n"):
                self.offset += len(line)
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue
                if isinstance(record, dict):
                    limit -= 1
                    yield record, self.offset

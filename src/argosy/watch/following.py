"""In-memory data from a growing JSONL file: each line is parsed once, and readers get the lock between two batches."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path

from argosy.record.jsonl import Record
from argosy.record.tail import Tail


class FollowedFile(ABC):
    """A growing file, read in batches of `at_once` lines. Readers can take the lock between two batches."""

    def __init__(self, path: Path, at_once: int) -> None:
        self._tail, self._at_once = Tail(path), at_once
        self._lock, self._updating = threading.Lock(), threading.Lock()

    def update(self) -> None:
        """Read to the end of the file. If another thread is reading, return at once."""
        if not self._updating.acquire(blocking=False):
            return
        try:
            while records := [record for record, _ in self._tail.read(self._at_once)]:
                with self._lock:
                    self._take(records)
        finally:
            self._updating.release()

    @property
    def reading(self) -> bool:
        """True while the file has more lines than were read."""
        return self._updating.locked()

    @abstractmethod
    def _take(self, records: list[Record]) -> None:
        """Store what is needed of the records. The caller holds the lock."""

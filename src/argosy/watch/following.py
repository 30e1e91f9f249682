"""What is kept in memory of a JSONL file that grows: each line is looked at once, and readers get in between two batches."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path

from argosy.record.jsonl import Record
from argosy.record.tail import Tail


class Following(ABC):
    def __init__(self, path: Path, at_once: int) -> None:
        """`at_once` lines are taken between two moments at which readers get in."""
        self._tail, self._at_once = Tail(path), at_once
        self._lock, self._updating = threading.Lock(), threading.Lock()

    def update(self) -> None:
        """Read to the end of the file. A second caller does not wait for the first."""
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
        """Whether there is more in the file than was read so far."""
        return self._updating.locked()

    @abstractmethod
    def _take(self, records: list[Record]) -> None:
        """Keep what is worth it; the lock is held."""

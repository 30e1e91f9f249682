"""Pieces of work that the processes of a job divide among themselves while they run, on any number of machines.

A piece is done when its file exists. A process takes a piece that nobody has, and keeps its lock while it makes it. Where others hold
all that is left, it waits for one of them: the kernel wakes it when the piece is done, or when the process that made it died. Then it
makes the piece itself. No process waits while it holds a piece, so none waits for ever.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from argosy.data.prepare.locks import PieceLocks

_log = logging.getLogger(__name__)
# The most pieces of a phase.
_MOST = 1 << 40
# How often a process that waits says so.
_SAY_S = 300.0


class PieceQueue:
    """The pieces of one phase of a job.

    Args:
        locks: The locks of this process.
        phase: The number of the phase in the job.
        kind: What the pieces are, for a message.
        paths: The file of each piece.
        is_over: Returns True once the whole job is finished. Its files may be gone then.
    """

    def __init__(
        self, locks: PieceLocks, phase: int, kind: str, paths: Mapping[int, Path], is_over: Callable[[], bool]
    ) -> None:
        self._locks, self._first, self._kind, self._paths, self._is_over = locks, phase * _MOST, kind, paths, is_over
        self._next_said = 0.0

    def missing(self) -> list[int]:
        """Return the pieces that are not done."""
        pieces = [piece for piece, path in self._paths.items() if not path.exists()]
        # A file is removed only after the job is over, so it is looked for first.
        return pieces if pieces and not self._is_over() else []

    def take(self, pieces: Iterable[int]) -> Iterator[int]:
        """Yield those of the pieces that are not done and that no other process makes, each with its lock."""
        for piece in pieces:
            if self._is_done(piece) or not self._locks.take(self._first + piece):
                continue
            # Another process may have made it just before.
            if self._is_done(piece):
                self.release(piece)
            else:
                yield piece

    def release(self, piece: int) -> None:
        """Give up the lock of a piece."""
        self._locks.release(self._first + piece)

    def wait(self, missing: list[int]) -> None:
        """Wait until no other process makes the first of the missing pieces."""
        piece, ended = missing[0], threading.Event()
        teller = threading.Thread(target=self._tell, args=(len(missing), self._paths[piece], ended), daemon=True)
        teller.start()
        try:
            self._locks.take(self._first + piece, wait=True)
        finally:
            ended.set()
            teller.join()
        self.release(piece)

    def divide(self, make: Callable[[list[int]], None], own: Iterable[int] = ()) -> None:
        """Have `make` make pieces until all are done: those of `own` together, then one at a time of those that are free."""
        own = tuple(own)
        while missing := self.missing():
            taken = list(self.take(own)) or list(itertools.islice(self.take(missing), 1))
            if not taken:
                self.wait(missing)
                continue
            try:
                make(taken)
            finally:
                for piece in taken:
                    self.release(piece)

    def _tell(self, count: int, path: Path, ended: threading.Event) -> None:
        """Say what is waited for, at most once in `_SAY_S` seconds, until the wait has ended."""
        while not ended.wait(max(0.0, self._next_said - time.monotonic())):
            all_of = len(self._paths)
            _log.info("other processes have the last %d of %d %s; waiting for %s", count, all_of, self._kind, path)
            self._next_said = time.monotonic() + _SAY_S

    def _is_done(self, piece: int) -> bool:
        return self._paths[piece].exists() or self._is_over()

"""Prefetch threads that download announced blocks in order, with a limit on blocks that are fetched but not yet read.

A reader never waits for a place in the queue: it downloads a block itself if no thread has started it, and waits only for a
block that is being downloaded. So prefetching can be slow, full or broken without blocking a reader. A failed download raises
where its block is read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from argosy.errors import ArgosyError

# (shard, block)
Key = tuple[int, int]


class ReadAhead:
    """A block prefetcher. It calls `fetch` in `threads` threads; at most `room` blocks are in flight or fetched but not yet read."""

    def __init__(self, fetch: Callable[[Key], None], threads: int, room: int | None) -> None:
        self._fetch, self._threads, self._room = fetch, threads, room
        self._change = threading.Condition()
        # Blocks to fetch, in the order of need.
        self._waiting: dict[Key, None] = {}
        self._in_flight: set[Key] = set()
        # Blocks that are fetched and not yet read.
        self._fetched: set[Key] = set()
        self._failed: dict[Key, Exception] = {}
        self._tasks: list[Callable[[], None]] = []
        self._started = self._closed = False

    def announce(self, keys: Iterable[Key]) -> None:
        """Replace the queue by these blocks, nearest first."""
        with self._change:
            wanted = dict.fromkeys(keys)
            self._fetched &= wanted.keys()
            self._failed.clear()
            self._waiting = {key: None for key in wanted if key not in self._fetched and key not in self._in_flight}
            self._start()
            self._change.notify_all()

    def announced(self) -> set[Key]:
        """Return the blocks that are in flight, or fetched and not yet read."""
        with self._change:
            return self._fetched | self._in_flight

    def take(self, key: Key) -> None:
        """Take a block out of the queue, because the reader needs it now. Wait if it is in flight; raise if its download failed."""
        with self._change:
            self._waiting.pop(key, None)
            while key in self._in_flight and not self._closed:
                self._change.wait()
            self._fetched.discard(key)
            self._change.notify_all()
            if (error := self._failed.pop(key, None)) is not None:
                raise error

    def run_in_background(self, task: Callable[[], None]) -> None:
        """Run a task in one of the threads. Its errors are ignored."""
        with self._change:
            self._tasks.append(task)
            self._start()
            self._change.notify_all()

    def close(self) -> None:
        """Stop the threads and drop the queue."""
        with self._change:
            self._closed = True
            self._waiting.clear()
            self._change.notify_all()

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        # Daemon threads: Ctrl-C must not wait for a store that does not answer.
        for number in range(self._threads):
            threading.Thread(target=self._work, name=f"argosy-fetch-{number}", daemon=True).start()

    def _next(self) -> Key | Callable[[], None] | None:
        with self._change:
            while not self._closed:
                if self._tasks:
                    return self._tasks.pop()
                if self._waiting and (self._room is None or len(self._fetched) + len(self._in_flight) < self._room):
                    key = next(iter(self._waiting))
                    del self._waiting[key]
                    self._in_flight.add(key)
                    return key
                self._change.wait()
            return None

    def _work(self) -> None:
        while (item := self._next()) is not None:
            if callable(item):
                with contextlib.suppress(ArgosyError):
                    item()
                continue
            error: Exception | None = None
            try:
                self._fetch(item)
            except Exception as failure:  # noqa: BLE001 - `take` raises it in the reader
                error = failure
            with self._change:
                self._in_flight.discard(item)
                self._fetched.add(item)
                if error is not None:
                    self._failed[item] = error
                self._change.notify_all()

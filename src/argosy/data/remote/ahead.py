"""Threads that fetch announced blocks in order, no more of them ahead of the reader than there is room for.

A reader never waits for a place in the queue: a block not yet begun it fetches itself, one under way it waits for. So
fetching ahead can be slow, full or broken without holding anyone up; what went wrong is raised where the block is read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from argosy.errors import ArgosyError

Key = tuple[int, int]  # shard, block


class ReadAhead:
    """`fetch` is called in `threads` threads; at most `room` blocks are fetched and not yet read."""

    def __init__(self, fetch: Callable[[Key], None], threads: int, room: int | None) -> None:
        self._fetch, self._threads, self._room = fetch, threads, room
        self._change = threading.Condition()
        self._waiting: dict[Key, None] = {}  # in the order of need
        self._flying: set[Key] = set()
        self._landed: set[Key] = set()  # and not read yet
        self._failed: dict[Key, Exception] = {}
        self._tasks: list[Callable[[], None]] = []
        self._started = self._closed = False

    def announce(self, keys: Iterable[Key]) -> None:
        with self._change:
            wanted = dict.fromkeys(keys)
            self._landed &= wanted.keys()
            self._failed.clear()
            self._waiting = {key: None for key in wanted if key not in self._landed and key not in self._flying}
            self._start()
            self._change.notify_all()

    def announced(self) -> set[Key]:
        with self._change:
            return self._landed | self._flying

    def take(self, key: Key) -> None:
        """The reader has come to this block."""
        with self._change:
            self._waiting.pop(key, None)
            while key in self._flying and not self._closed:
                self._change.wait()
            self._landed.discard(key)
            self._change.notify_all()
            if (error := self._failed.pop(key, None)) is not None:
                raise error

    def afterwards(self, task: Callable[[], None]) -> None:
        """Something to do in the background; its outcome is its own affair."""
        with self._change:
            self._tasks.append(task)
            self._start()
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._waiting.clear()
            self._change.notify_all()

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        for number in range(self._threads):  # daemons: Ctrl-C must not wait for a store that does not answer
            threading.Thread(target=self._work, name=f"argosy-fetch-{number}", daemon=True).start()

    def _next(self) -> Key | Callable[[], None] | None:
        with self._change:
            while not self._closed:
                if self._tasks:
                    return self._tasks.pop()
                if self._waiting and (self._room is None or len(self._landed) + len(self._flying) < self._room):
                    key = next(iter(self._waiting))
                    del self._waiting[key]
                    self._flying.add(key)
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
            except Exception as failure:  # noqa: BLE001 - handed to the reader of this block, which raises it
                error = failure
            with self._change:
                self._flying.discard(item)
                self._landed.add(item)
                if error is not None:
                    self._failed[item] = error
                self._change.notify_all()

"""Batches read ahead by a thread, so that training waits for data only when the disk is slower than the model.

The whole state is the number of samples consumed. The time spent waiting is measured, since a run that is short of
data looks, from its throughput alone, like one with a slow model.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType

from argosy.config.batches import Batches
from argosy.data.samples.windows import Batch, Stream

_AHEAD = 4  # batches kept ready
_FAREWELL_S = 5.0  # that the end of a run waits for a read under way; a store that hangs must not hold it up
_ANNOUNCED = 8  # batches whose reads are announced to corpora that have to be fetched


class Loader:
    """Global batches from `consumed_samples` on, in order; where `ranks` share them, the equal part of each that falls to
    `rank`, so that together they read what one would. Use it as a context manager. `place` is called in the reading thread
    and may move a batch to where the device reads it best; `position` says where in the stream a sample is, where some were
    passed over."""

    def __init__(
        self,
        stream: Stream,
        *,
        batches: Batches,
        consumed_samples: int,
        rank: int = 0,
        ranks: int = 1,
        place: Callable[[Batch], Batch] = lambda batch: batch,
        position: Callable[[int], int] = lambda consumed_samples: consumed_samples,
    ) -> None:
        self._stream, self._batches, self._place, self._position = stream, batches, place, position
        self._rank, self._ranks = rank, ranks
        self._next = consumed_samples
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(_AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="argosy-loader", daemon=True)
        self.waited_s = 0.0  # since it was last reset by the reader of this figure

    def __enter__(self) -> Loader:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        deadline = time.monotonic() + _FAREWELL_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:  # make room for a reader that is blocked on a full queue
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def next_batch(self) -> Batch:
        started = time.perf_counter()
        item = self._queue.get()
        self.waited_s += time.perf_counter() - started
        if isinstance(item, BaseException):
            raise item
        return item

    def _read(self) -> None:
        while not self._stop.is_set():
            size = self._batches.size(self._next)
            try:
                first = self._position(self._next)
                self._stream.prefetch(first, _ANNOUNCED * size)
                share = size // self._ranks
                item: Batch | BaseException = self._place(self._stream.batch(first + self._rank * share, share))
            except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
                item = error
            self._next += size
            self._queue.put(item)
            if isinstance(item, BaseException):
                return

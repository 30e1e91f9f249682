"""A data loader that prefetches batches in a thread, so training waits only when the disk is slower than the model.

The only state is the number of consumed samples. The loader measures the time spent waiting for data, because throughput
alone does not tell a data-bound run from a slow model.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType

from argosy.config.batches import Batches
from argosy.data.samples.windows import Batch, Stream

# Number of batches in the prefetch queue.
_PREFETCH_BATCHES = 4
# Number of batches whose token ranges are announced to remote corpora, which download them ahead.
_ANNOUNCED_BATCHES = 8
# How long the end of a run waits for a pending read: an object store that hangs must not block the exit.
_JOIN_TIMEOUT_S = 5.0


class Loader:
    """An iterator over one rank's share of the global batches, starting at `consumed_samples`. Use it as a context manager.

    Args:
        stream: The samples.
        batches: The global batch size as a function of the consumed samples.
        consumed_samples: The number of samples that training has consumed so far.
        rank: The data-parallel rank. It reads a contiguous 1/`ranks` of each global batch.
        ranks: The number of data-parallel ranks.
        place: A function called in the prefetch thread, for example to copy a batch to page-locked memory.
        position: A function from consumed samples to an index in the stream; they differ after a rewind skipped samples.
    """

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
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(_PREFETCH_BATCHES)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="argosy-loader", daemon=True)
        # Seconds spent waiting for data; the meter reads and resets it.
        self.waited_s = 0.0

    def __enter__(self) -> Loader:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            # Unblock a reader that waits on a full queue.
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def next_batch(self) -> Batch:
        """Return the next batch. Raise here whatever the prefetch thread failed with."""
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
                self._stream.prefetch(first, _ANNOUNCED_BATCHES * size)
                share = size // self._ranks
                item: Batch | BaseException = self._place(self._stream.batch(first + self._rank * share, share))
            except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
                item = error
            self._next += size
            self._queue.put(item)
            if isinstance(item, BaseException):
                return

"""When a save, a log or an evaluation is due."""

from __future__ import annotations

import time
from collections.abc import Callable

from argosy.config.batches import Batches
from argosy.config.units import Duration


class Timer:
    """Something due every so many steps, samples or seconds of a clock. Of samples, at the step that takes the last of
    them."""

    def __init__(
        self, every: Duration, samples: int | None, batches: Batches, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every, self._samples, self._batches = every, samples, batches
        self._clock, self._last = clock, clock()

    def every(self, seconds: float) -> None:
        """From now on due after so many seconds, counted from when it last was."""
        self._every, self._samples = Duration(seconds, "seconds"), None

    def due(self, step: int) -> bool:
        if self._every.unit == "steps":
            return step % int(self._every.amount) == 0
        if self._samples is not None:
            before, after = self._batches.samples(step - 1), self._batches.samples(step)
            return after // self._samples > before // self._samples
        if self._clock() - self._last < self._every.amount:
            return False
        self._last = self._clock()
        return True

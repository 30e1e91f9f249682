"""Telling a spike of the loss from a hard batch.

The loss of a small batch has outliers, and one of several sources may be harder than the rest; neither is news. A spike stands far
above what the loss was lately. It is told at once where it is twice as far as it has to be, else when it comes again within three
logs; and not at all where the loss has been as high three times before within a thousand logs, and came down again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

_WINDOW = 128  # logs the loss is compared with
_FEWEST = 16  # of them, before anything is called a spike
_AGAIN, _OF = 2, 3  # logs, for one that stands less far out
_TIMES, _WITHIN, _AS_HIGH = 3, 1000, 0.7  # that make it usual: times, within so many logs, to so much of its height
_LEAST_SHARE, _LEAST = 0.01, 0.1  # a deviation is at least so much of the loss; a spike is at least so much above it


class Spikes:
    def __init__(self, deviations: float) -> None:
        """`deviations` above the mean, at which the loss stands out."""
        self._deviations = deviations
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._high: deque[bool] = deque([False], maxlen=_OF)
        self._heights: deque[tuple[int, float]] = deque(
            maxlen=32
        )  # (log, height above the mean) of each time it was high
        self._logs = 0
        self.text = ""

    @property
    def over(self) -> bool:
        """Nothing stood out lately."""
        return not any(self._high)

    def look(self, loss: float) -> bool:
        """Whether this is a spike, as `text` tells."""
        self._logs += 1
        if len(self._losses) < _FEWEST:
            self._losses.append(loss)
            return False
        mean = statistics.fmean(self._losses)
        deviation = math.sqrt(statistics.fmean((loss - mean) ** 2 for loss in self._losses))
        limit = max(self._deviations * max(deviation, _LEAST_SHARE * abs(mean)), _LEAST)
        height, goes_on = loss - mean, self._high[-1]
        self._high.append(height > limit)
        before = [h for log, h in self._heights if log > self._logs - _WITHIN]
        usual = sum(h > _AS_HIGH * height for h in (before[:-1] if goes_on else before)) >= _TIMES
        if height > limit:
            if goes_on:
                height = max(height, self._heights.pop()[1])
            self._heights.append((self._logs, height))
        self._losses.append(min(loss, mean + limit))  # what stands out moves the mean, but not at once
        self.text = (
            f"the loss is {loss:.4f}, and was {mean:.4f} ± {deviation:.4f} over the last {len(self._losses)} logs"
        )
        return self._high[-1] and not usual and (height > 2 * limit or sum(self._high) >= _AGAIN)

"""Detection of loss spikes, which must be told from hard batches.

The loss of a small batch has outliers, and one data source may be harder than the others; neither is a spike. A loss is high
when it exceeds the recent mean by a limit. It is a spike if it exceeds twice the limit, or if it is high in 2 of 3 logs. It is
no spike if the loss was about as high 3 times within the last 1,000 logs and came down again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# Logs in the baseline, and the fewest before a spike can be detected.
_WINDOW, _FEWEST = 128, 16
# A loss below twice the limit is a spike when it is high in _AGAIN of _OF logs.
_AGAIN, _OF = 2, 3
# A height is usual if the loss was _AS_HIGH times as high _TIMES times within _WITHIN logs.
_TIMES, _WITHIN, _AS_HIGH = 3, 1000, 0.7
# Lower bounds: of the standard deviation as a share of the mean, and of the limit in nats.
_LEAST_SHARE, _LEAST = 0.01, 0.1


class Spikes:
    """The spike detector of a run. The limit is `deviations` standard deviations above the mean."""

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._high: deque[bool] = deque([False], maxlen=_OF)
        # (number of the log, height above the mean) of each time that the loss was high.
        self._heights: deque[tuple[int, float]] = deque(maxlen=32)
        self._logs = 0
        self.text = ""

    @property
    def over(self) -> bool:
        """True if the loss was not high in the last `_OF` logs."""
        return not any(self._high)

    def look(self, loss: float) -> bool:
        """Add a loss and return whether it is a spike. `text` describes it."""
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
        # Clipped, so that a high loss moves the mean only slowly.
        self._losses.append(min(loss, mean + limit))
        self.text = (
            f"the loss is {loss:.4f}, and was {mean:.4f} ± {deviation:.4f} over the last {len(self._losses)} logs"
        )
        return self._high[-1] and not usual and (height > 2 * limit or sum(self._high) >= _AGAIN)

"""Telling a change from noise.

From one log to the next a figure of a small run on a busy machine jumps by half, one of a large run by a hundredth. One rule is
right for both: the median of the latest logs has to lie far from what is usual, with what is uncertain about it taken off, in
each quarter of that time, and for longer than a neighbour's short burst of work. Where there is more noise it takes more logs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LEAST_S = 30.0  # that a change has to last
_SURE = 3.5  # standard errors


def lasting(times: Sequence[float], excess: Sequence[float], *, limit: float, spans: Sequence[int]) -> float | None:
    """The median of the latest values where it is above `limit` beyond doubt, over any of the `spans`, which are numbers of logs.
    `excess` is by how much each value is more than usual."""
    for count in spans:
        if count > len(times) or times[-1] - times[-count] < LEAST_S:
            continue
        latest = excess[-count:]
        middle = statistics.median(latest)
        spread = 1.4826 * statistics.median(
            [abs(value - middle) for value in latest]
        )  # a standard deviation, if normal
        error = 1.2533 * spread / math.sqrt(count)  # of a median
        quarters = [latest[i * count // 4 : (i + 1) * count // 4] for i in range(4)]
        agreed = all(statistics.median(quarter) > limit / 2 for quarter in quarters)
        if middle > limit and middle - _SURE * error > limit / 2 and agreed:
            return middle
    return None

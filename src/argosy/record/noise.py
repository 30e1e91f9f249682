"""A robust test that tells a lasting change from noise.

Between two logs, a metric of a small run on a busy machine may change by 50%, one of a large run by 1%. One test serves both:
the median of the latest logs must exceed the limit, must exceed half the limit by 3.5 standard errors, must do so in each
quarter of the span, and the span must last 30 seconds, longer than a neighbour's short burst of work. More noise needs more logs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Shortest time that a change must last, in seconds.
LEAST_S = 30.0
_STANDARD_ERRORS = 3.5


def lasting(times: Sequence[float], excess: Sequence[float], *, limit: float, spans: Sequence[int]) -> float | None:
    """Return the median of the latest values of `excess` if it is significantly above `limit`, else None.

    Args:
        times: wall-clock seconds of each log.
        excess: by how much each value is above its baseline.
        spans: numbers of latest logs to test; one that passes is enough.
    """
    for count in spans:
        if count > len(times) or times[-1] - times[-count] < LEAST_S:
            continue
        latest = excess[-count:]
        middle = statistics.median(latest)
        # 1.4826: median absolute deviation to standard deviation, if normal. 1.2533: standard error of a median.
        deviation = 1.4826 * statistics.median([abs(value - middle) for value in latest])
        error = 1.2533 * deviation / math.sqrt(count)
        quarters = [latest[i * count // 4 : (i + 1) * count // 4] for i in range(4)]
        in_every_quarter = all(statistics.median(quarter) > limit / 2 for quarter in quarters)
        if middle > limit and middle - _STANDARD_ERRORS * error > limit / 2 and in_every_quarter:
            return middle
    return None

"""The alert rules of a run: each rule checks every logged record and raises its alert once until the condition has cleared.

A condition must last before it raises an alert (`lasting`): a short slowdown, a busy machine, or a rank that is
always slightly slower is no alert. It must clear by a margin before the alert can be raised again, so that alerts do not flap.
Alerts are events of the run: the console, the webhook and the dashboard read them from events.jsonl. Two alerts are raised
elsewhere: a stall by the heartbeat process, since a stalled trainer cannot (`argosy.record.pulse`), and a failed save by
`argosy.train.saving`.

`lasting` is a robust test that tells a lasting change from noise. Between two logs, a metric of a small run on a busy machine may change by 50%, one of a large run by 1%. One test serves both:
the median of the latest logs must exceed the limit, must exceed half the limit by 3.5 standard errors, must do so in each
quarter of the span, and the span must last 30 seconds, longer than a neighbour's short burst of work. More noise needs more logs.

`Spikes` tells loss spikes from hard batches. The loss of a small batch has outliers, and one data source may be harder than the others; neither is a spike. A loss is high
when it exceeds the recent mean by a limit. It is a spike if it exceeds twice the limit, or if it is high in 2 of 3 logs. It is
no spike if the loss was about as high 3 times within the last 1,000 logs and came down again.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.config.watching import AlertsSpec
from argosy.record.jsonl import Record
from argosy.record.rank_columns import Ranks

Ratios = NDArray[np.float32]
# Logs in the baseline of throughput.
_WINDOW = 128
# Throughput drop: spans of latest logs to test, and the fewest logs before any test.
_RATE_SPANS, _RATE_FEWEST = (5, 20, 60), 32
# Slow rank: spans of latest logs to test.
_RANK_SPANS = (30, 100, 200)
# A rank that is slower by less than this many seconds a step delays nobody.
_LEAST_LATE_S = 1e-3

# TROUBLE: events that report a problem; `alert` is the kind raised here. NEWS: events worth sending to a webhook.
TROUBLE = frozenset(("alert", "skip", "rewind", "stall", "rank-died", "save-failed", "non-finite", "failed", "gave-up"))
NEWS = TROUBLE | {"restart", "interrupted", "done", "sink-down"}


class Alerts:
    """All alert rules of a run. `observe` takes a logged record and returns the alerts it raises, as fields of an event."""

    def __init__(self, spec: AlertsSpec, root: Path) -> None:
        self._spec, self._root = spec, root
        self._spikes = Spikes(spec.spike)
        self._rates: deque[tuple[float, float]] = deque(maxlen=_WINDOW)  # (time, log of tokens/s)
        self._ratios: deque[tuple[float, Ratios]] = deque(maxlen=_RANK_SPANS[-1])  # (time, log of each rank's ratio)
        self._raised: set[str] = set()
        self._slow_ranks: set[int] = set()

    def observe(self, record: Record, ranks: Ranks | None = None) -> list[dict[str, Any]]:
        found = [*self._numbers(record), *self._rate(record), *self._disk()]
        if ranks is not None and len(ranks.columns["own_s"]) > 1:
            found += self._slow(ranks)
        return found

    def _numbers(self, record: Record) -> Iterator[dict[str, Any]]:
        loss, norm = record["loss"], record["grad_norm"]
        # With fp16 loss scaling, an infinite gradient norm is the normal way to find the scale.
        scaled = record.get("loss_scale") is not None
        non_finite = not (math.isfinite(loss) and (scaled or math.isfinite(norm)))
        yield from self._when(non_finite, "nan", f"the loss is {loss:g} and the gradient norm {norm:g}")
        if not math.isfinite(loss):
            return
        spike = self._spikes.look(loss)
        yield from self._when(spike, "spike", self._spikes.text, well=self._spikes.over, loss=loss)

    def _rate(self, record: Record) -> Iterator[dict[str, Any]]:
        self._rates.append((record["time"], math.log(max(record["tokens_per_s"], 1e-9))))
        if len(self._rates) < _RATE_FEWEST:
            return
        times, rates = zip(*self._rates, strict=True)
        usual, limit = statistics.median(rates[: -_RATE_SPANS[0]]), -math.log1p(-min(self._spec.throughput_drop, 0.99))
        below = [usual - rate for rate in rates]
        latest = statistics.median(below[-_RATE_SPANS[0] :])
        text = f"{math.exp(usual - latest):,.0f} tokens/s, and {math.exp(usual):,.0f} is usual"
        drop = lasting(times, below, limit=limit, spans=_RATE_SPANS)
        yield from self._when(drop is not None, "throughput-drop", text, well=latest < limit / 2)

    def _disk(self) -> Iterator[dict[str, Any]]:
        try:
            free = shutil.disk_usage(self._root).free / 2**30
        except OSError:
            return
        text = f"{free:.2f} GiB are free where {self._root} lies"
        yield from self._when(free < self._spec.disk_gib, "disk-low", text, free_gib=round(free, 3))

    def _slow(self, ranks: Ranks) -> Iterator[dict[str, Any]]:
        ratios = np.log(np.maximum(np.array(ranks.ratios(), np.float32), 1e-6))
        if self._ratios and len(self._ratios[-1][1]) != len(ratios):
            self._ratios.clear()
        self._ratios.append((ranks.time, ratios))
        times, limit = [time for time, _ in self._ratios], math.log1p(self._spec.slow_rank)
        table = np.stack([row for _, row in self._ratios])
        means = [table[-count:].mean(0) for count in _RANK_SPANS]
        # A cheap vectorised test first: few ranks pass it, however many there are.
        suspects = np.flatnonzero(np.max(means, axis=0) > limit / 2)
        for rank in sorted({*suspects.tolist(), *self._slow_ranks}):
            excess = table[:, rank].tolist()
            late = lasting(times, excess, limit=limit, spans=_RANK_SPANS)
            holds_up = late is not None and -math.expm1(-late) * ranks.columns["own_s"][rank] > _LEAST_LATE_S
            if holds_up and late is not None and rank not in self._slow_ranks:
                self._slow_ranks.add(rank)
                yield {
                    "alert": "slow-rank",
                    "text": _describe_slow_rank(ranks, rank, late),
                    "rank": rank,
                    "ratio": round(math.exp(late), 3),
                }
            elif statistics.median(excess[-_RANK_SPANS[0] :]) < limit / 2:
                self._slow_ranks.discard(rank)

    def _when(
        self, holds: bool, kind: str, text: str, *, well: bool = True, **facts: object
    ) -> Iterator[dict[str, Any]]:
        """Yield the alert when the condition begins to hold. It can be raised again once the condition is false and `well` is true."""
        if not holds:
            if well:
                self._raised.discard(kind)
        elif kind not in self._raised:
            self._raised.add(kind)
            yield {"alert": kind, "text": text, **facts}


def _describe_slow_rank(ranks: Ranks, rank: int, late: float) -> str:
    own, data = ranks.columns["own_s"][rank], ranks.columns.get("data_s", [])
    waits = f", and waits for data {data[rank] / own:.0%} of its time" if data and data[rank] > 0.5 * own else ""
    return f"rank {rank} takes {math.expm1(late):.0%} longer than its peers{waits}"


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

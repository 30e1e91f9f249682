"""The alert rules of a run: each rule checks every logged record and raises its alert once until the condition has cleared.

A condition must last before it raises an alert (`argosy.record.noise`): a short slowdown, a busy machine, or a rank that is
always slightly slower is no alert. It must clear by a margin before the alert can be raised again, so that alerts do not flap.
Alerts are events of the run: the console, the webhook and the dashboard read them from events.jsonl. Two alerts are raised
elsewhere: a stall by the heartbeat process, since a stalled trainer cannot (`argosy.record.pulse`), and a failed save by
`argosy.train.saving`.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.config.watching import AlertsSpec
from argosy.record.jsonl import Record
from argosy.record.noise import lasting
from argosy.record.rank_columns import Ranks
from argosy.record.spikes import Spikes

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

"""When a run speaks up: each rule looks at the records as they are logged, and says so once until things are well again.

Rules are slow to speak: what they look at has to last (`argosy.record.noise`), so that a slow moment, a busy machine, or a rank that
is always a little slower, is no alarm; and it has to be well again by a margin before they speak anew, so that they do not flap.
Alerts are events of the run; whoever reads events.jsonl (console, webhook, dashboard) has them. A stall is noticed beside the
trainer, which stands still itself (`argosy.record.pulse`), and a save that fails where it is made (`argosy.train.saving`).
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
_WINDOW = 128  # logs that say what throughput is usual
_RATE_SPANS, _RATE_FEWEST = (5, 20, 60), 32  # latest logs; logs before them that say what is usual
_RANK_SPANS = (30, 100, 200)
_LEAST_LATE_S = 1e-3  # a step: ranks that are later by less hold up nobody

# Events that say something is wrong, `alert` being what the rules here make; and those that are news to whoever is not looking.
TROUBLE = frozenset(("alert", "skip", "rewind", "stall", "rank-died", "save-failed", "non-finite", "failed", "gave-up"))
NEWS = TROUBLE | {"restart", "interrupted", "done", "sink-down"}


class Alerts:
    """`observe` gives the alerts a logged step raises, as facts for an event."""

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
        scaled = record.get("loss_scale") is not None  # an infinite norm is how fp16 finds its scale
        broken = not (math.isfinite(loss) and (scaled or math.isfinite(norm)))
        yield from self._when(broken, "nan", f"the loss is {loss:g} and the gradient norm {norm:g}")
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
        suspects = np.flatnonzero(np.max(means, axis=0) > limit / 2)  # few, however many ranks there are
        for rank in sorted({*suspects.tolist(), *self._slow_ranks}):
            excess = table[:, rank].tolist()
            late = lasting(times, excess, limit=limit, spans=_RANK_SPANS)
            holds_up = late is not None and -math.expm1(-late) * ranks.columns["own_s"][rank] > _LEAST_LATE_S
            if holds_up and late is not None and rank not in self._slow_ranks:
                self._slow_ranks.add(rank)
                yield {
                    "alert": "slow-rank",
                    "text": _told(ranks, rank, late),
                    "rank": rank,
                    "ratio": round(math.exp(late), 3),
                }
            elif statistics.median(excess[-_RANK_SPANS[0] :]) < limit / 2:
                self._slow_ranks.discard(rank)

    def _when(
        self, holds: bool, kind: str, text: str, *, well: bool = True, **facts: object
    ) -> Iterator[dict[str, Any]]:
        """The alert, where it has just come to hold; it can be raised anew once it no longer holds and all is `well`."""
        if not holds:
            if well:
                self._raised.discard(kind)
        elif kind not in self._raised:
            self._raised.add(kind)
            yield {"alert": kind, "text": text, **facts}


def _told(ranks: Ranks, rank: int, late: float) -> str:
    own, data = ranks.columns["own_s"][rank], ranks.columns.get("data_s", [])
    waits = f", and waits for data {data[rank] / own:.0%} of its time" if data and data[rank] > 0.5 * own else ""
    return f"rank {rank} takes {math.expm1(late):.0%} longer than its peers{waits}"

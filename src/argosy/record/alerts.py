"""When a run speaks up: each rule looks at the records as they are logged, and says so once until things are well again.

Rules are slow to speak: what they look at has to hold over several logs, so that a slow moment, or a rank that is always a little
slower, is no alarm; and it has to be well again by a margin before they speak anew, so that a noisy machine does not make them
flap. Alerts are events of the run; whoever reads events.jsonl (console, webhook, dashboard) has them.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from argosy.config.watching import AlertsSpec
from argosy.record.jsonl import Record
from argosy.record.ranks import Ranks

_WINDOW = 128  # records the loss is compared with
_FEWEST = 16  # before anything is called a spike or a drop
_RATE_FEWEST, _RATE_RECENT = 32, 5  # logs that say what is usual, and of which all have to be below it
_RANK_WINDOW = 20  # logs over which a rank has to be slow, nine of ten times

# Events that are news to whoever is not looking; `alert` is what the rules here make.
NEWS = frozenset(
    (
        "alert",
        "stall",
        "rank-died",
        "save-failed",
        "non-finite",
        "restart",
        "gave-up",
        "interrupted",
        "done",
        "sink-down",
    )
)


class Alerts:
    """`observe` gives the alerts a logged step raises, as facts for an event."""

    def __init__(self, spec: AlertsSpec, root: Path) -> None:
        self._spec, self._root = spec, root
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._rates: deque[float] = deque(maxlen=_WINDOW)
        self._ratios: dict[int, deque[float]] = {}
        self._raised: set[str] = set()

    def observe(self, record: Record, ranks: Ranks | None = None) -> list[dict[str, Any]]:
        found = [*self._numbers(record), *self._rate(record), *self._disk()]
        if ranks is not None and len(ranks.columns["own_s"]) > 1:
            found += self._slow(ranks)
        return found

    def _numbers(self, record: Record) -> Iterator[dict[str, Any]]:
        loss, norm = record["loss"], record["grad_norm"]
        broken = not (math.isfinite(loss) and math.isfinite(norm))
        yield from self._when(broken, "nan", f"the loss is {loss:g} and the gradient norm {norm:g}")
        if not math.isfinite(loss):
            return
        high = False
        if len(self._losses) >= _FEWEST:
            mean, deviation = statistics.fmean(self._losses), statistics.pstdev(self._losses)
            limit = mean + self._spec.spike * max(deviation, 0.01 * abs(mean))
            high = loss > limit
            text = (
                f"the loss is {loss:.4f}, and was {mean:.4f} ± {deviation:.4f} over the last {len(self._losses)} logs"
            )
            yield from self._when(high, "spike", text, loss=loss)
        if not high:
            self._losses.append(loss)

    def _rate(self, record: Record) -> Iterator[dict[str, Any]]:
        rate = record["tokens_per_s"]
        self._rates.append(rate)
        if len(self._rates) >= _RATE_FEWEST:
            usual, recent = statistics.median(self._rates), list(self._rates)[-_RATE_RECENT:]
            low, well = ((1 - share * self._spec.throughput_drop) * usual for share in (1.0, 0.5))
            text = f"{statistics.median(recent):,.0f} tokens/s, and {usual:,.0f} is usual"
            yield from self._when(max(recent) < low, "throughput-drop", text, well=statistics.median(recent) > well)

    def _disk(self) -> Iterator[dict[str, Any]]:
        try:
            free = shutil.disk_usage(self._root).free / 2**30
        except OSError:
            return
        text = f"{free:.2f} GiB are free where {self._root} lies"
        yield from self._when(free < self._spec.disk_gib, "disk-low", text, free_gib=round(free, 3))

    def _slow(self, ranks: Ranks) -> Iterator[dict[str, Any]]:
        for rank, ratio in enumerate(ranks.ratios()):
            seen = self._ratios.setdefault(rank, deque(maxlen=_RANK_WINDOW))
            seen.append(ratio)
            if len(seen) < _RANK_WINDOW:
                continue
            usual, well = statistics.median(seen), 1 + self._spec.slow_rank / 2
            slow = usual > 1 + self._spec.slow_rank and sum(r > well for r in seen) >= 0.9 * len(seen)
            data = ranks.columns.get("data_s", [0.0] * (rank + 1))[rank]
            own = ranks.columns["own_s"][rank] or 1e-12
            text = f"rank {rank} takes {usual - 1:.0%} longer than its peers over the last {len(seen)} logs"
            if data > 0.5 * own:
                text += f", and waits for data {data / own:.0%} of it"
            facts = {"rank": rank, "ratio": round(usual, 3)}
            yield from self._when(slow, "slow-rank", text, name=f"slow-rank {rank}", well=usual < well, **facts)

    def _when(
        self, holds: bool, kind: str, text: str, *, name: str | None = None, well: bool | None = None, **facts: object
    ) -> Iterator[dict[str, Any]]:
        """The alert, where it has just come to hold; it can be raised anew once all is `well`, or no longer holds."""
        name = name or kind
        if not holds:
            if well is not False:
                self._raised.discard(name)
        elif name not in self._raised:
            self._raised.add(name)
            yield {"alert": kind, "text": text, **facts}

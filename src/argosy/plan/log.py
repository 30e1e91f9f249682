"""Comparison of a training log with the plan: step time, MFU, time to the end, skipped and NaN steps.

It reads the lines Megatron-LM prints. Many other frameworks print them too.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from argosy.errors import ArgosyError
from argosy.plan.search import Candidate

_LINE = re.compile(r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|(.*)")
_DAY = 86_400
# Measured step time relative to the plan above which the log is called slow. The error of the plan itself is smaller.
_SLOW = 1.5


@dataclass(frozen=True)
class Log:
    """The steps of a training log.

    `seconds` is the step time of each logged line. `steps` is the length of the whole run, and `logged` the number of steps that
    the lines cover. `loss_scale` is the last one.
    """

    seconds: list[float]
    steps: int
    global_batch: int | None
    skipped: int
    not_a_number: int
    logged: int
    loss_scale: float | None

    @property
    def pace(self) -> float:
        """The median step time in seconds, without the first line if there are others: the first step includes start-up."""
        return statistics.median(self.seconds[1:] or self.seconds)


def read_log(path: Path) -> Log:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ArgosyError(
            "plan.bad-log", f"{path} cannot be read: {error.strerror}", key="--log", value=path, fix="check the path"
        ) from None
    rows = [(int(m[1]), int(m[2]), _fields(m[3])) for m in map(_LINE.search, text.splitlines()) if m]
    timed = [row for row in rows if "elapsed time per iteration (ms)" in row[2]]
    if not timed:
        raise ArgosyError(
            "plan.bad-log",
            f"{path} has no line with a step time in Megatron-LM's format",
            key="--log",
            value=path,
            fix="give the log of the first rank: lines with `iteration 10/ 1000 | … elapsed time per iteration (ms): 250.0 |`",
        )
    last = timed[-1][2]
    batch, scale = last.get("global batch size"), last.get("loss scale")
    return Log(
        seconds=[fields["elapsed time per iteration (ms)"] / 1000 for _, _, fields in timed],
        steps=timed[-1][1],
        global_batch=None if batch is None else int(batch),
        skipped=int(sum(fields.get("number of skipped iterations", 0) for _, _, fields in timed)),
        not_a_number=int(sum(fields.get("number of nan iterations", 0) for _, _, fields in timed)),
        logged=timed[-1][0] - timed[0][0] + 1 if len(timed) == 1 else _steps_of(timed),
        loss_scale=scale,
    )


def _steps_of(timed: list[tuple[int, int, dict[str, float]]]) -> int:
    """Return the number of steps the lines cover. A line covers the steps since the line before, the first as many as the second."""
    between = timed[1][0] - timed[0][0]
    return timed[-1][0] - timed[0][0] + max(1, between)


def _fields(text: str) -> dict[str, float]:
    """Parse the `name: number` fields between vertical bars."""
    found = {}
    for part in text.split("|"):
        name, _, value = part.partition(":")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            continue
    return found


def judge(log: Log, best: Candidate) -> Iterator[str]:
    """Yield the findings in plain words, the worst last."""
    pace = log.pace
    mfu = best.mfu * best.time.total / pace
    against = pace / best.time.total
    yield (
        f"{pace:,.2f} s per step, the median of {max(1, len(log.seconds) - 1):,}: MFU {mfu:.1%}; the plan's best layout takes "
        f"{best.time.total:,.2f} s"
    )
    yield f"{log.steps:,} steps at this rate take {_length(log.steps * pace)}"
    if against > _SLOW:
        yield f"that is {against:,.0f} times the plan: check the layout, whether the network fell back to TCP, and whether others use the GPUs"
    if log.not_a_number:
        yield f"{log.not_a_number:,} of {log.logged:,} steps had a NaN loss"
    if log.skipped:
        scale = "" if log.loss_scale is None else f", at a loss scale of {log.loss_scale:,.0f}"
        learned = "; nothing was learned in them" if log.skipped < log.logged else "; nothing has been learned yet"
        yield f"{log.skipped:,} of {log.logged:,} steps were skipped because their gradients overflowed{scale}{learned}"


def _length(seconds: float) -> str:
    days = seconds / _DAY
    return f"{days:,.1f} days" if days < 365 else f"{days:,.0f} days ({days / 365.25:.1f} years)"

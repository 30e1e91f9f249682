"""What a training log measured, held against the plan: the pace, what it uses of the GPUs, when it would end, and whether
anything is learned at all. Reads the lines Megatron-LM prints, which many logs of others have."""

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
_SLOW = 1.5  # times the plan: more than the plan's own error


@dataclass(frozen=True)
class Log:
    """Steps as they were logged."""

    seconds: list[float]  # a step, of each logged line
    steps: int  # of the whole run
    global_batch: int | None
    skipped: int
    not_a_number: int
    logged: int  # steps the lines stand for
    loss_scale: float | None  # the last

    @property
    def pace(self) -> float:
        """Seconds of a step; the first is left out where there are others, since it starts things up."""
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
            f"{path} has no line of a step with its time, as Megatron-LM prints them",
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
    """A line stands for the steps since the one before; the first for as many as the second."""
    between = timed[1][0] - timed[0][0]
    return timed[-1][0] - timed[0][0] + max(1, between)


def _fields(text: str) -> dict[str, float]:
    """`name: number` between bars."""
    found = {}
    for part in text.split("|"):
        name, _, value = part.partition(":")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            continue
    return found


def judge(log: Log, best: Candidate) -> Iterator[str]:
    """The log in plain words, the worst last."""
    pace = log.pace
    mfu = best.mfu * best.time.total / pace
    against = pace / best.time.total
    yield (
        f"{pace:,.2f} s a step, the median of {max(1, len(log.seconds) - 1):,}: MFU {mfu:.1%}; the plan's best takes "
        f"{best.time.total:,.2f} s"
    )
    yield f"{log.steps:,} steps at this pace are {_length(log.steps * pace)}"
    if against > _SLOW:
        yield f"that is {against:,.0f} times the plan: look for a layout that waits, links that fell back to TCP, or GPUs that others use"
    if log.not_a_number:
        yield f"{log.not_a_number:,} of {log.logged:,} steps had a loss that is no number"
    if log.skipped:
        scale = "" if log.loss_scale is None else f", at a loss scale of {log.loss_scale:,.0f}"
        learned = "; nothing was learned in them" if log.skipped < log.logged else "; nothing has been learned yet"
        yield f"{log.skipped:,} of {log.logged:,} steps were skipped because their gradients overflowed{scale}{learned}"


def _length(seconds: float) -> str:
    days = seconds / _DAY
    return f"{days:,.1f} days" if days < 365 else f"{days:,.0f} days ({days / 365.25:.1f} years)"

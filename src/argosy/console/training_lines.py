"""The console output of training: a progress bar on a terminal, one line per logged step elsewhere."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from argosy.console.formats import amount, clock
from argosy.record.jsonl import Record

# A regular expression for the start of a step line, for programs that watch logs.
STEP_LINE = r"step [0-9]+/[0-9]+ \| loss "
# The line with which training ends before its last step: the step it saved, and how many there are.
STOPPED_LINE = r"stopped at step ([0-9]+) of ([0-9]+), saved"
# With ARGOSY_STEP_LINES=node, the first rank of every node prints step lines, not only the first rank of all.
STEP_LINES, EVERY_NODE = "ARGOSY_STEP_LINES", "node"
# The most columns of a step line.
WIDTH = 100


class Console(Protocol):
    """The output of a training run."""

    def step(self, record: Record) -> None: ...
    def advance(self, step: int) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def stopped_line(step: int, steps: int) -> str:
    return f"stopped at step {step} of {steps}, saved; run the same command again to go on"


def open_console(*, first: int, last: int, quiet: bool = False) -> Console:
    """Return the console for steps `first` to `last`: a bar if standard output is a terminal, else lines."""
    if quiet:
        return StepLinesOnly() if _watched(os.environ) else Quiet()
    if sys.stdout.isatty():
        return Bar(first, last)
    return Lines()


class Quiet:
    """No output."""

    def step(self, record: Record) -> None: ...
    def advance(self, step: int) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def _watched(environ: Mapping[str, str]) -> bool:
    return environ.get(STEP_LINES) == EVERY_NODE and environ.get("LOCAL_RANK", "0") == "0"


class Lines:
    """Plain lines. When the reader exits, as `head` does, the lines stop and the run goes on."""

    def __init__(self) -> None:
        self._open = True

    def step(self, record: Record) -> None:
        self.note(describe(record))

    def advance(self, step: int) -> None: ...

    def note(self, text: str) -> None:
        try:
            if self._open:
                print(text, flush=True)
        except OSError:
            self._open = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None: ...


class StepLinesOnly(Lines):
    """Step lines only, for a launcher that watches this node's log."""

    def step(self, record: Record) -> None:
        super().note(describe(record))

    def note(self, text: str) -> None: ...


class Bar:
    """A progress bar on a terminal."""

    def __init__(self, first: int, last: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("train"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[facts]}")
        )
        self._task: Any = self._progress.add_task("train", total=last, completed=first, facts="")
        self._progress.start()

    def step(self, record: Record) -> None:
        self._progress.update(self._task, completed=record["step"], facts=describe(record, short=True))

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


def describe(record: Record, *, short: bool = False) -> str:
    """Format a record as one line of at most `WIDTH` columns. `short` leaves out what the bar shows and what rarely changes.

    A figure that is not known is left out. Less important figures follow while there is room: metrics.jsonl has all of them.
    """
    parts = [] if short else [f"step {record['step']}/{record.get('steps', '?')}"]
    parts += _figures(record, ("loss",) if short else ("loss", "grad_norm", "lr"))
    parts.append(f"{amount(record.get('tokens_per_s') or 0.0)} tok/s")
    end = _figures(record, ("eta_s",))
    for extra in _figures(record, _EXTRAS[:2] if short else _EXTRAS):
        if len(" | ".join([*parts, extra, *end])) <= WIDTH:
            parts.append(extra)
    return " | ".join([*parts, *end])


_FORMATS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "grad_norm": lambda value: f"grad {value:.3f}" if value < 100 else f"grad {value:.3g}",
    "lr": lambda value: f"lr {value:.2e}",
    "loss_scale": lambda value: f"scale {value:g}",
    "skipped": lambda value: f"{value:.0f} skipped",
    "mfu": lambda value: f"MFU {100 * value:.1f}%",
    "data_wait": lambda value: f"data wait {100 * value:.0f}%",
    "memory_gib": lambda value: f"mem {value:.2f} GiB",
    "cost": lambda value: f"${value:,.2f}",
    "goodput": lambda value: f"goodput {100 * value:.0f}%",
    "tflops": lambda value: f"{value:.3g} TFLOP/s",
    "eta_s": lambda value: f"ETA {clock(value)}",
}
# The most important first.
_EXTRAS = ("skipped", "loss_scale", "mfu", "data_wait", "memory_gib", "cost", "goodput", "tflops")


def _figures(record: Record, keys: Iterable[str]) -> list[str]:
    """Format the figures that are known, unless they are too small to matter."""
    least = {"skipped": 1, "data_wait": 0.01}
    known = {key: record[key] for key in keys if record.get(key) is not None}
    return [_FORMATS[key](value) for key, value in known.items() if not value < least.get(key, -math.inf)]

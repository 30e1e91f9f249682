"""The console output of training: a progress bar on a terminal, one line per logged step elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from argosy.console.formats import amount, clock
from argosy.record.jsonl import Record

# A regular expression for the start of a step line, for programs that watch logs.
STEP_LINE = r"step [0-9]+/[0-9]+ \| loss "
# The line with which training ends before its last step: the step it saved, and how many there are.
STOPPED_LINE = r"stopped at step ([0-9]+) of ([0-9]+), saved"
# With ARGOSY_STEP_LINES=node, the first rank of every node prints step lines, not only the first rank of all.
STEP_LINES, EVERY_NODE = "ARGOSY_STEP_LINES", "node"


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
    """Format a record as one line. `short` leaves out what the bar shows and what rarely changes."""

    def figure(key: str, form: str, scale: float = 1.0) -> str:
        value = record.get(key)
        return "n/a" if value is None else f"{scale * value:{form}}"

    parts = [] if short else [f"step {record['step']}/{record.get('steps', '?')}"]
    parts.append(f"loss {figure('loss', '.4f')}")
    if not short:
        parts += [f"grad norm {figure('grad_norm', '.3f')}", f"lr {figure('lr', '.2e')}"]
    if record.get("loss_scale") is not None:
        parts.append(f"loss scale {figure('loss_scale', 'g')}, {figure('skipped', '.0f')} skipped")
    elif record.get("skipped"):
        parts.append(f"{figure('skipped', '.0f')} skipped")
    parts.append(f"{amount(record.get('tokens_per_s') or 0.0)} tok/s")
    if not short:
        of = f"% of {record.get('peak')}" if record.get("mfu") is not None else ""
        parts += [f"{figure('tflops', '.3g')} TFLOP/s", f"MFU {figure('mfu', '.1f', 100)}{of}"]
        parts += [f"data wait {figure('data_wait', '.1f', 100)}%", f"mem {figure('memory_gib', '.2f')} GiB"]
        if record.get("goodput") is not None:
            parts.append(f"goodput {figure('goodput', '.0f', 100)}%")
        if record.get("cost") is not None:
            parts.append(f"${figure('cost', ',.2f')}")
    parts.append(f"ETA {clock(record['eta_s']) if record.get('eta_s') is not None else 'n/a'}")
    return " | ".join(parts)

"""What a person sees while a run trains: a progress bar on a terminal, one line per logged step elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from argosy.console.formats import amount, clock
from argosy.record.jsonl import Record

STEP_LINE = r"step [0-9]+/[0-9]+ \| loss "  # how a line about a step begins, for those who watch logs
STEP_LINES, EVERY_NODE = (
    "ARGOSY_STEP_LINES",
    "node",
)  # set so, the first rank of every node prints these lines, and not only the first of all


class Console(Protocol):
    def step(self, record: Record) -> None: ...
    def advance(self, step: int) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def open_console(*, first: int, last: int, quiet: bool = False) -> Console:
    """The view for steps `first`..`last`: bar or lines, by what standard output is."""
    if quiet:
        return Beats() if _watched(os.environ) else Quiet()
    if sys.stdout.isatty():
        return Bar(first, last)
    return Lines()


class Quiet:
    def step(self, record: Record) -> None: ...
    def advance(self, step: int) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def _watched(environ: Mapping[str, str]) -> bool:
    return environ.get(STEP_LINES) == EVERY_NODE and environ.get("LOCAL_RANK", "0") == "0"


class Lines:
    """Plain lines. A reader that leaves, as `head` does, ends the lines and not the run."""

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


class Beats(Lines):
    """Lines about steps and nothing else: signs of life for whoever watches this node's log."""

    def step(self, record: Record) -> None:
        super().note(describe(record))

    def note(self, text: str) -> None: ...


class Bar:
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
    """One step in words. `short` leaves out what the bar already shows and what rarely changes."""

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

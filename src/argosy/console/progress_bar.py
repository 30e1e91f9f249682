"""The progress bar of long work other than training: a bar with rate and ETA on a terminal, a line every 5 seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from argosy.console.formats import amount, clock, volume

_SECONDS_BETWEEN_LINES = 5.0


class ProgressBar:
    """A progress bar on standard error: `with ProgressBar("prepare", total_bytes, "B") as progress: progress.advance(n)`."""

    def __init__(self, label: str, total: float, unit: str) -> None:
        self.label, self.total, self.unit, self.done = label, total, unit, 0.0
        self._started = self._last_line = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> ProgressBar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn
            from rich.progress import Progress as RichProgress

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[facts]}"),
            )
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self.label, total=self.total, facts="")
            self._bar.start()
        return self

    def advance(self, amount_done: float) -> None:
        self.done += amount_done
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, facts=self._facts())
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(
                f"{self.label}: {100 * self.done / max(self.total, 1):.0f}% | {self._facts()}",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _facts(self) -> str:
        rate = self.done / max(time.monotonic() - self._started, 1e-9)
        remaining = (self.total - self.done) / rate if rate else 0.0
        shown = volume(rate) if self.unit == "B" else f"{amount(rate)}{self.unit}"
        return f"{shown}/s | ETA {clock(max(0.0, remaining))}"

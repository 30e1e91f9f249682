"""`argosy watch`: a live view of a run in the terminal, or plain lines if standard output is not a terminal."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from argosy.console.output import say
from argosy.console.training_lines import describe
from argosy.record.tail import Tail
from argosy.watch.reading import is_number, printable, valid_fields, valid_metrics
from argosy.watch.run_list import Run, require_run
from argosy.watch.screen import event_line, screen

_EVERY_S, _READ_S = 1.0, 0.5


def watch(path: Path, *, once: bool) -> None:
    """Show the run until it ends or Ctrl-C. `once` shows its present state and returns."""
    require_run(path)
    run = Run(path.resolve().name, path)
    run.listen()
    if sys.stdout.isatty() and not once:
        _in_terminal(run)
    else:
        _lines(run, once)


def _lines(run: Run, once: bool) -> None:
    metrics, events = Tail(run.dir.metrics), Tail(run.dir.events)
    while True:
        # Read the state first, so that the last lines are not missed.
        state = run.state()
        for _, line in sorted([*_steps(metrics), *_events(events)], key=lambda item: item[0]):
            say(line)
        if once or state in ("done", "stopped", "dead"):
            say(f"{printable(run.name)} is {state}")
            return
        time.sleep(_EVERY_S)


def _steps(metrics: Tail) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    for raw, _ in metrics.read():
        record = valid_metrics(raw)
        if is_number(record.get("step")):
            text = describe(record) if "loss" in record else ""
            if record.get("validation_loss") is not None:
                text = f"step {record['step']}: validation loss {record['validation_loss']:.4f}"
            found.append((record.get("time") or (found[-1][0] if found else 0.0), text))
    return [(when, text) for when, text in found if text]


def _events(events: Tail) -> list[tuple[float, str]]:
    read = (valid_fields(event) for event, _ in events.read() if isinstance(event.get("event"), str))
    return [(event.get("time", 0.0), event_line(event)) for event in read]


def _in_terminal(run: Run) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                reader = threading.Thread(target=run.series.update, daemon=True)
                reader.start()
                # A long file is shown as far as it has been read.
                reader.join(_READ_S)
                live.update(screen(run, console.width, console.height), refresh=True)
                time.sleep(_EVERY_S)
        except KeyboardInterrupt:
            pass

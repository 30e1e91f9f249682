"""`argosy watch`: a run as it trains, in the terminal; plain lines where standard output is not one."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from argosy.console.output import say
from argosy.console.training_lines import describe
from argosy.record.tail import Tail
from argosy.watch.reading import figures, is_number, printable, sound
from argosy.watch.run_list import Run, require_run
from argosy.watch.screen import screen, told

_EVERY_S, _READ_S = 1.0, 0.5


def watch(path: Path, *, once: bool) -> None:
    """Until the run ends or Ctrl-C; `once` shows what there is and leaves."""
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
        state = run.state()  # before reading, so that what came last is not missed
        for _, line in sorted([*_steps(metrics), *_events(events)], key=lambda item: item[0]):
            say(line)
        if once or state in ("done", "stopped", "dead"):
            say(f"{printable(run.name)} is {state}")
            return
        time.sleep(_EVERY_S)


def _steps(metrics: Tail) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    for raw, _ in metrics.read():
        record = figures(raw)
        if is_number(record.get("step")):
            text = describe(record) if "loss" in record else ""
            if record.get("validation_loss") is not None:
                text = f"step {record['step']}: validation loss {record['validation_loss']:.4f}"
            found.append((record.get("time") or (found[-1][0] if found else 0.0), text))
    return [(when, text) for when, text in found if text]


def _events(events: Tail) -> list[tuple[float, str]]:
    read = (sound(event) for event, _ in events.read() if isinstance(event.get("event"), str))
    return [(event.get("time", 0.0), told(event)) for event in read]


def _in_terminal(run: Run) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                reader = threading.Thread(target=run.series.update, daemon=True)
                reader.start()
                reader.join(_READ_S)  # a long file is shown as far as it was read
                live.update(screen(run, console.width, console.height), refresh=True)
                time.sleep(_EVERY_S)
        except KeyboardInterrupt:
            pass

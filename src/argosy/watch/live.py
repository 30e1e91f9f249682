"""`argosy watch`: a run as it trains, in the terminal; plain lines where standard output is not one."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

from argosy.record.console import amount, clock, describe
from argosy.record.jsonl import Record
from argosy.record.ledger import PARTS
from argosy.record.plot import plot
from argosy.record.tail import Tail
from argosy.watch.runs import Run, require_run

_EVERY_S = 1.0


def watch(path: Path, *, once: bool) -> None:
    """Until the run ends or Ctrl-C; `once` shows what there is and leaves."""
    require_run(path)
    run = Run(path.resolve().name, path)
    if sys.stdout.isatty() and not once:
        _in_terminal(run)
    else:
        _lines(run, once)


def _lines(run: Run, once: bool) -> None:
    metrics, events = Tail(run.dir.metrics), Tail(run.dir.events)
    while True:
        state = run.state()  # before reading, so that what came last is not missed
        for record, _ in metrics.read():
            if "loss" in record and "lr" in record:
                print(describe(record), flush=True)
            elif "validation_loss" in record:
                print(f"step {record.get('step')}: validation loss {record['validation_loss']:.4f}", flush=True)
        for event, _ in events.read():
            print(told(event), flush=True)
        if once or state in ("done", "stopped", "dead"):
            print(f"{run.name} is {state}", flush=True)
            return
        time.sleep(_EVERY_S)


def _in_terminal(run: Run) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                run.series.update()
                live.update(screen(run, console.width, console.height), refresh=True)
                time.sleep(_EVERY_S)
        except KeyboardInterrupt:
            pass


def screen(run: Run, width: int, height: int) -> Any:
    """Everything at a glance: what is going on, two curves, where time goes, ranks, and the newest events."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    last, state = run.series.last, run.state()
    colour = {"running": "green", "done": "cyan", "stopped": "yellow"}.get(state, "red")
    head = Text.assemble((run.name, "bold"), "  ", (state, colour), "  ", _headline(last))
    room = max(20, width // 2 - 16)
    tall = max(4, min(12, (height - 20) // 2 + 4))
    curves = [_curve(run, name, label, room, tall) for name, label in (("loss", "loss"), ("tokens_per_s", "tokens/s"))]
    parts: list[Any] = [
        head,
        Columns([Panel(Text(curve), width=width // 2 - 1) for curve in curves], padding=0),
        Columns(
            [
                Panel(_time(last), title="where time goes", width=width // 2 - 1),
                Panel(_ranks(run), title="ranks", width=width // 2 - 1),
            ],
            padding=0,
        ),
        Panel(
            Text("\n".join(told(event) for event in run.events()[-max(3, height - tall - 22) :]) or "none"),
            title="events",
        ),
        Text("Ctrl-C leaves; the run goes on", style="dim"),
    ]
    return Group(*parts)


def _headline(last: Record) -> str:
    if not last:
        return "nothing logged yet"
    mfu = "MFU n/a" if last.get("mfu") is None else f"MFU {100 * last['mfu']:.1f}% of {last['peak']}"
    cost = "" if "cost" not in last else f"  ${last['cost']:,.2f}"
    goodput = "" if "goodput" not in last else f"  goodput {100 * last['goodput']:.0f}%"
    return (
        f"step {last.get('step')}/{last.get('steps')}  loss {last.get('loss', math.nan):.4f}  {amount(last.get('tokens_per_s', 0.0))} tok/s"
        f"  {mfu}{goodput}{cost}  ETA {clock(last.get('eta_s', 0.0))}"
    )


def _curve(run: Run, name: str, label: str, width: int, height: int) -> str:
    curve = run.series.curves([name], pieces=2 * width).get(name)
    points = [] if curve is None else list(zip(map(float, curve["step"]), curve["mean"], strict=True))
    return plot(points, width=width, height=height, y_label=label, x_label="steps")


def _time(last: Record) -> str:
    parts = {key.removeprefix("time/"): value for key, value in last.items() if key.startswith("time/")}
    spent = last.get("spent") or {}
    total = sum(spent.values()) or 1.0
    lines = ["of a step:"] if parts else []
    lines += [f"  {name:<17}{1000 * seconds:9.1f} ms" for name, seconds in parts.items()]
    lines += ["of the run:"] + [
        f"  {part:<17}{clock(spent[part]):>9} {100 * spent[part] / total:5.1f}%" for part in PARTS if spent.get(part)
    ]
    return "\n".join(lines)


def _ranks(run: Run) -> str:
    beats = list(run.heartbeats().values())
    last = run.series.last
    lines = (
        [f"slowest: rank {last['slowest_rank']}, {100 * last['rank_spread']:.1f}% over its peers"]
        if "slowest_rank" in last
        else []
    )
    for beat in beats[:10]:
        lines.append(
            f"{beat.get('rank'):>4} {str(beat.get('host'))[:16]:<16} step {beat.get('step')}  {beat.get('phase')} {beat.get('phase_s', 0):.1f}s"
        )
    if len(beats) > 10:
        lines.append(f"     and {len(beats) - 10} more")
    return "\n".join(lines) or "no heart beats"


def told(event: Record) -> str:
    """One event in a line."""
    when = time.strftime("%H:%M:%S", time.localtime(float(event.get("time", 0.0))))
    what = event.get("alert") or ""
    kind = f"alert {what}" if event.get("event") == "alert" else str(event.get("event"))
    text = event.get("text") or event.get("cause") or event.get("path") or ""
    return f"{when} step {event.get('step')} {kind} {text}".rstrip()

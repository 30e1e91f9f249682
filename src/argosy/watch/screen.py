"""A run on one terminal screen of any size: state, two curves, time by cause, ranks, and the newest events.

Lists that do not fit lose their first lines, or are left out. The newest events always have room.
"""

from __future__ import annotations

import time
from typing import Any

from rich.layout import Layout
from rich.panel import Panel
from rich.text import Text

from argosy.console.braille_plot import plot
from argosy.console.formats import amount, clock
from argosy.record.alerts import TROUBLE
from argosy.record.jsonl import Record
from argosy.record.ledger import PARTS
from argosy.watch.reading import printable
from argosy.watch.run_list import Run

# Including the frame.
_FACTS_ROWS = len(PARTS) + 2
_FEWEST_EVENTS_ROWS, _FEWEST_CURVE_ROWS = 5, 7
_SHORT = {"forward_backward": "fwd+bwd"}


def screen(run: Run, width: int, height: int) -> Layout:
    """Return the view of a run for a terminal of this size."""
    last, state = run.series.last, run.state()
    rest = height - 2 - _FEWEST_EVENTS_ROWS
    facts = _FACTS_ROWS if rest >= _FACTS_ROWS else 0
    curves = max(0, (rest - facts) * 2 // 3 if height > 30 else rest - facts)
    curves = curves if curves >= _FEWEST_CURVE_ROWS else 0
    events = height - 2 - facts - curves
    rows = [Layout(_head(run, last, state, width), size=1)]
    if curves:
        sides = [
            Layout(_curve(run, *what, width // 2, curves)) for what in (("loss", "loss"), ("tokens_per_s", "tokens/s"))
        ]
        rows.append(_beside(sides, curves))
    if facts:
        sides = [Layout(_panel(*what)) for what in (_of_a_step(last), _of_the_run(last), _ranks(run, last))]
        rows.append(_beside(sides, facts))
    rows.append(Layout(_events(run, events - 2), size=events))
    rows.append(Layout(Text("Ctrl-C leaves; the run goes on", style="dim", no_wrap=True), size=1))
    whole = Layout()
    whole.split_column(*rows)
    return whole


def event_line(event: Record) -> str:
    """Return an event as one line."""
    when = time.strftime("%H:%M:%S", time.localtime(event.get("time", 0.0)))
    kind = f"alert {event.get('alert', '')}" if event.get("event") == "alert" else str(event.get("event"))
    text = next((event[key] for key in ("text", "cause", "reason", "path") if event.get(key)), "")
    rank = f"rank {event['rank']}: " if "rank" in event and "text" not in event else ""
    return printable(f"{when} step {event.get('step', '?')} {kind} {rank}{text}".rstrip())


def _beside(sides: list[Layout], rows: int) -> Layout:
    layout = Layout(size=rows)
    layout.split_row(*sides)
    return layout


def _panel(title: str, lines: list[str]) -> Panel:
    return Panel(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), title=title)


def _head(run: Run, last: Record, state: str, width: int) -> Text:
    colour = {"running": "green", "done": "cyan", "stopped": "yellow", "new": "dim"}.get(state, "red")
    facts = [f"step {last.get('step')}/{last.get('steps', '?')}"] if last else ["nothing logged yet"]
    if last.get("loss") is not None:
        facts.append(f"loss {last['loss']:.4f}")
    elif last:
        facts.append("loss NaN")
    if last.get("tokens_per_s") is not None:
        facts.append(f"{amount(last['tokens_per_s'])} tok/s")
    if state == "running" and last.get("eta_s") is not None:
        facts.append(f"ETA {clock(last['eta_s'])}")
    if last.get("goodput") is not None:
        facts.append(f"goodput {100 * last['goodput']:.0f}%")
    if last.get("cost") is not None:
        facts.append(f"${last['cost']:,.2f}")
    if last:
        facts.append("MFU n/a" if last.get("mfu") is None else f"MFU {100 * last['mfu']:.1f}% of {last.get('peak')}")
    name = printable(run.name)[: max(8, width // 3)]
    return Text.assemble(
        (name, "bold"), "  ", (state, colour), "  ", "  ".join(facts), no_wrap=True, overflow="ellipsis"
    )


def _curve(run: Run, name: str, label: str, width: int, rows: int) -> Panel:
    room = max(10, width - 14)
    curve = run.series.curves([name], pieces=2 * room).get(name)
    points = [] if curve is None else list(zip(map(float, curve["step"]), curve["mean"], strict=True))
    return Panel(Text(plot(points, width=room, height=rows - 4, x_label="steps"), no_wrap=True), title=label)


def _of_a_step(last: Record) -> tuple[str, list[str]]:
    parts = {key.removeprefix("time/"): value for key, value in last.items() if key.startswith("time/") and value}
    return "a step, ms", [f"{_SHORT.get(name, name):<14}{1000 * seconds:8.1f}" for name, seconds in parts.items()]


def _of_the_run(last: Record) -> tuple[str, list[str]]:
    spent = last.get("spent") or {}
    total = sum(spent.values()) or 1.0
    shown = [part for part in PARTS if spent.get(part)]
    return "the run", [f"{part:<11}{clock(spent[part]):>7}{100 * spent[part] / total:4.0f}%" for part in shown]


def _ranks(run: Run, last: Record) -> tuple[str, list[str]]:
    """Return the lines about ranks: those furthest behind, or longest in a phase, first."""
    beats = sorted(run.heartbeats().values(), key=lambda beat: (beat.get("step", 0), -beat.get("phase_s", 0.0)))
    lines = []
    if last.get("slowest_rank") is not None and last.get("rank_spread") is not None:
        lines.append(f"slowest: rank {last['slowest_rank']}, +{100 * last['rank_spread']:.1f}%")
    room = len(PARTS) - len(lines) - (len(beats) + len(lines) > len(PARTS))
    for beat in beats[:room]:
        doing = f"{beat.get('phase')} {beat.get('phase_s', 0):.0f}s" if beat.get("alive") else "ended"
        lines.append(printable(f"{beat.get('rank'):>4} {doing}, step {beat.get('step')}, {beat.get('host')}"))
    lines += [f"     and {len(beats) - room} more"] if len(beats) > room else []
    return "ranks", lines or ["no heartbeats"]


def _events(run: Run, rows: int) -> Any:
    lines = Text(no_wrap=True, overflow="ellipsis")
    for event in run.events()[-max(1, rows) :]:
        bad = event.get("event") in TROUBLE
        lines.append(event_line(event) + "\n", style="red" if bad else "")
    lines.rstrip()
    return Panel(lines if lines.plain else Text("none"), title="events")

"""The goodput ledger of a run: wall time by cause, productive steps first.

Every logged record carries the sums so far, so that a reader needs only the newest one. A resumed run continues the sums of
its last record. Two spans become `lost`: work after the checkpoint that the run resumed from, and the time between the failed
attempt's last record and the event that reports its end. From there to the next start is `down`. When the supervisor restarts
the ranks within a job, the machines stay allocated, and no time is `down`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson

from argosy.record.jsonl import Record, now
from argosy.record.rundir import RunDir

PRODUCTIVE = "productive"
PARTS = (PRODUCTIVE, "data", "evaluation", "save", "startup", "lost", "down")
MEANING = {
    PRODUCTIVE: "steps that count, without waiting for data",
    "data": "waiting for data",
    "evaluation": "evaluation",
    "save": "saves that held up training",
    "startup": "from the start of the program to its first step",
    "lost": "steps that were done again after a failure, and the wait until it was noticed",
    "down": "between a stop and the next start",
}


class Ledger:
    """Seconds by part of `PARTS`. `spend` adds to one of them."""

    def __init__(self, spent: Mapping[str, float] | None = None) -> None:
        self.spent = {part: float((spent or {}).get(part, 0.0)) for part in PARTS}

    @classmethod
    def resumed(cls, run: RunDir, step: int, started: float, *, held: bool = False) -> Ledger:
        """Return the ledger of a run that resumes after `step`.

        Args:
            started: wall-clock seconds when this process started.
            held: the machines stayed allocated since the last record, as when a run rewinds.
        """
        newest, at = _last_records(run.metrics, step)
        if newest is None:
            return cls()
        ledger = cls(newest["spent"])
        kept = 0.0 if at is None else float(at["spent"][PRODUCTIVE])
        ledger.spent["lost"] += max(0.0, ledger.spent[PRODUCTIVE] - kept)
        ledger.spent[PRODUCTIVE] = kept
        logged = float(newest["time"])
        kind, ended = ("restart", started) if held else _last_event(run.events, logged, started)
        ledger.spend("save" if kind in ("done", "interrupted") else "lost", ended - logged)
        ledger.spend("down", started - ended)
        return ledger

    def spend(self, part: str, seconds: float) -> None:
        self.spent[part] += max(0.0, seconds)

    @property
    def held_s(self) -> float:
        """Seconds that the machines were allocated: everything except the time between attempts."""
        return sum(self.spent.values()) - self.spent["down"]

    def report(self, price: float | None) -> Record:
        total = sum(self.spent.values())
        record: Record = {
            "goodput": self.spent[PRODUCTIVE] / total if total else 0.0,
            "spent": {part: round(seconds, 3) for part, seconds in self.spent.items()},
        }
        if price is not None:
            record["cost"] = self.held_s / 3600 * price
        return record


def process_started() -> float:
    """Return the wall-clock time in seconds when this process started, or the current time where /proc is missing."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return now() - max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return now()


def _last_records(metrics: Path, step: int) -> tuple[Record | None, Record | None]:
    """Return the newest record that has sums, and the newest such record up to `step`. Reads from the end of the file."""
    newest = None
    for line in _lines_backwards(metrics):
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("spent"), dict) and isinstance(record.get("step"), int):
            newest = newest or record
            if record["step"] <= step:
                return newest, record
    return newest, None


def _last_event(events: Path, logged: float, started: float) -> tuple[str, float]:
    """Return the kind and time of the newest event before `started`; ("", `logged`) if there is none.

    The time of a `restart` event is `started`: the new ranks follow it at once.
    """
    for line in _lines_backwards(events):
        try:
            event = orjson.loads(line)
            kind, time = str(event["event"]), float(event["time"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            continue
        if time <= started:
            return (kind, started) if kind == "restart" else (kind, max(logged, time))
    return "", logged


def _lines_backwards(path: Path, block: int = 1 << 16) -> Iterator[bytes]:
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        end, rest = file.seek(0, os.SEEK_END), b""
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            pieces = (file.read(end - start) + rest).split(b"\n")
            rest = pieces[0]
            yield from (piece for piece in reversed(pieces[1:]) if piece)
            end = start
        if rest:
            yield rest

"""Where the wall time of a run went: productive steps, and everything else by its cause.

Every logged record carries the sums so far, so that a reader needs only the newest one. A resumed run goes on from its
last record: the work that was logged after the checkpoint it resumed from moves from productive to lost, and so does what an
attempt that failed did, or waited for, after its last record, up to the event that tells of its end; what follows is down time.
Where ranks are started again within a job, its machines are held all the time, and nothing of it is down time.
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
    """Seconds by part. `spend` adds to one, `productive` is given the rest of an interval."""

    def __init__(self, spent: Mapping[str, float] | None = None) -> None:
        self.spent = {part: float((spent or {}).get(part, 0.0)) for part in PARTS}

    @classmethod
    def resumed(cls, run: RunDir, step: int, started: float, *, held: bool = False) -> Ledger:
        """Of a run that goes on from `step`, in a process that was `started` then (wall-clock seconds). `held`: the machines
        have been all the time, as by a run that rewinds."""
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
        """Seconds the machines were held: all but the time between attempts."""
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
    """When this process began, in wall-clock seconds; now, where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return now() - max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return now()


def _last_records(metrics: Path, step: int) -> tuple[Record | None, Record | None]:
    """The newest record with sums, and the newest of those up to `step`; read from the end of the file."""
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
    """The newest event of the attempt before, and its time; when its last record was logged, where there is none. One that says
    that ranks are started again is followed by that at once."""
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

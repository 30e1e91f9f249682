"""Where the wall time of a run went: productive steps, and everything else by its cause.

Every logged record carries the sums so far, so that a reader needs only the newest one. A resumed run goes on from its
last record: the work that was logged after the checkpoint it resumed from moves from productive to lost, and the time
between the two attempts is down time. What a killed attempt did after its last record is part of the latter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson

from argosy.record.jsonl import Record, now

PRODUCTIVE = "productive"
PARTS = (PRODUCTIVE, "data", "evaluation", "save", "startup", "lost", "down")
MEANING = {
    PRODUCTIVE: "steps that count, without waiting for data",
    "data": "waiting for data",
    "evaluation": "evaluation",
    "save": "saves that held up training",
    "startup": "from the start of the program to its first step",
    "lost": "steps that were done again after a restart",
    "down": "between a stop and the next start",
}


class Ledger:
    """Seconds by part. `spend` adds to one, `productive` is given the rest of an interval."""

    def __init__(self, spent: Mapping[str, float] | None = None) -> None:
        self.spent = {part: float((spent or {}).get(part, 0.0)) for part in PARTS}

    @classmethod
    def resumed(cls, metrics: Path, step: int, started: float, *, rewound: bool = False) -> Ledger:
        """Of a run that goes on from `step`, in a process that was `started` then (wall-clock seconds); one that was rewound
        has lost what it did since its last record."""
        newest, at = _last_records(metrics, step)
        if newest is None:
            return cls()
        ledger = cls(newest["spent"])
        kept = 0.0 if at is None else float(at["spent"][PRODUCTIVE])
        ledger.spent["lost"] += max(0.0, ledger.spent[PRODUCTIVE] - kept)
        ledger.spent[PRODUCTIVE] = kept
        ledger.spent["lost" if rewound else "down"] += max(0.0, started - float(newest["time"]))
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

"""What a sink is: something that takes the records of a run in order, and may fail at any time.

Sinks run in a process of their own (`argosy.record.sink_process`) and read the same files as everybody else. A sink that fails
is opened anew and given the same records again, so that `send` may meet records it has seen. When the step of a record is
not above that of the one before, the run went back to a checkpoint: what was sent for that step and later ones no longer holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from argosy.errors import ArgosyError
from argosy.record.jsonl import Record, read_jsonl


@dataclass(frozen=True)
class RunFacts:
    """What a sink may want to know of the run besides its records."""

    root: Path
    name: str
    run_id: str  # stays the same however often the run is started
    spec: dict[str, Any]  # the resolved run spec


AT_ONCE = 500


class Sink(Protocol):
    name: str
    source: str  # the file it reads: metrics or events
    at_once: int  # records in one call, which are sent again where it fails
    newest: int  # step it was sent last, in this process or an earlier one; -1: none

    def open(self) -> None:
        """Connect. A failure is not the end: it is tried again later."""

    def send(self, records: Sequence[Record]) -> None: ...

    def close(self) -> None: ...


def numbers(record: Record) -> dict[str, float]:
    """The figures of a record, by name: what can be plotted."""
    found: dict[str, float] = {}
    for name, value in record.items():
        kind = type(value)
        if (kind is float and math.isfinite(value)) or kind is int:
            found[name] = value
        elif kind is dict:
            found |= {f"{name}/{part}": v for part, v in numbers(value).items()}
    found.pop("step", None)
    found.pop("time", None)
    return found


def outcome(run: RunFacts) -> str:
    """How the run ended: done, interrupted, or anything else for a failure; a run whose record says nothing of it was killed."""
    ends = ("start", "resume", "done", "interrupted", "failed", "rank-died", "gave-up", "non-finite")
    said = [event["event"] for event in read_jsonl(run.root / "events.jsonl") if event.get("event") in ends]
    return str(said[-1]) if said else ""


def missing(package: str, extra: str) -> ArgosyError:
    return ArgosyError(
        "log.missing-extra",
        f"this sink needs the package {package}",
        key=f"log.sinks.{extra}",
        fix=f"pip install 'argosy[{extra}]', or leave the sink out",
    )

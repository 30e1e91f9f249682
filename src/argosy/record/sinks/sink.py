"""The sink protocol: a sink takes the records of a run in order, and may fail at any time.

Sinks run in the sink process (`argosy.record.sink_process`). A sink that fails is opened again and gets the same records, so
`send` may see a record twice. A record whose step is not above the previous one means that the run went back to a checkpoint:
records sent before for that step and later ones are no longer valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from argosy.errors import ArgosyError
from argosy.extras import install_extra
from argosy.record.jsonl import Record, read_jsonl


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run for its sinks. `run_id` stays the same across restarts; `spec` is the resolved spec without secrets."""

    root: Path
    name: str
    run_id: str
    spec: dict[str, Any]


AT_ONCE = 500


class Sink(Protocol):
    """One destination of records.

    source: the file that the sink reads, "metrics" or "events".
    at_once: most records in one `send`; after a failure all of them are sent again.
    newest: the last step that was sent, by this process or an earlier one; -1: none.
    """

    name: str
    source: str
    at_once: int
    newest: int

    def open(self) -> None:
        """Connect. If this raises, it is retried later."""

    def send(self, records: Sequence[Record]) -> None: ...

    def close(self) -> None: ...


def numbers(record: Record) -> dict[str, float]:
    """Return the numbers of a record by name, nested ones as `outer/inner`. Step, time and non-finite values are left out."""
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
    """Return the run's newest start or end event: "done", "interrupted", or another kind for a failure.

    A run that was killed has a start event and no end event.
    """
    kinds = ("start", "resume", "done", "interrupted", "failed", "rank-died", "gave-up", "non-finite")
    found = [event["event"] for event in read_jsonl(run.root / "events.jsonl") if event.get("event") in kinds]
    return str(found[-1]) if found else ""


def missing(package: str, extra: str) -> ArgosyError:
    return ArgosyError(
        "log.missing-extra",
        f"this sink needs the package {package}",
        key=f"log.sinks.{extra}",
        fix=f"{install_extra(extra)}, or leave the sink out",
    )

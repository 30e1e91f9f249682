"""The end of a run as its events tell it: done, stopped on request, or dead."""

from __future__ import annotations

from collections.abc import Iterable

from argosy.record.jsonl import Record

STARTS = frozenset(("start", "resume", "restart"))
# The state that an event leaves a run in. Any other kind of event says nothing about it.
_ENDS = {
    "done": "done",
    "interrupted": "stopped",
    "non-finite": "dead",
    "failed": "dead",
    "gave-up": "dead",
    "rank-died": "dead",
}


def last_turn(events: Iterable[Record]) -> str | None:
    """Return the kind of the newest event that starts or ends a run, or None."""
    kinds = [kind for event in events if (kind := event.get("event")) in STARTS or kind in _ENDS]
    return str(kinds[-1]) if kinds else None


def ended_as(events: Iterable[Record]) -> str | None:
    """Return `done`, `stopped` (on request) or `dead`; None if the run has not ended since its last start."""
    return _ENDS.get(last_turn(events) or "")

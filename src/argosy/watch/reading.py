"""Checked reading of a run directory's files, which may be damaged or come from strangers: a field of the wrong type is dropped."""

from __future__ import annotations

import os
import re
from typing import Any

from argosy.record.jsonl import Record

_NUMBERS = frozenset(
    ("step", "seconds", "rank", "wait_s", "pid", "phase_s", "longest_s", "progress", "ratio", "first")
)  # fmt: skip
_TEXTS = frozenset(
    ("event", "alert", "text", "cause", "reason", "phase", "path", "error", "debug", "collective", "host", "state", "fix", "code")
)  # fmt: skip
# Seconds since 1970 that a calendar can show.
_LATEST = 1e11


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def valid_fields(record: Record) -> Record:
    """Return the fields of an event or heartbeat that have the right type."""
    return {key: value for key, value in record.items() if _fits(key, value)}


def _fits(key: str, value: object) -> bool:
    if key == "time":
        return isinstance(value, int | float) and 0 <= value < _LATEST
    if key == "stack":
        return isinstance(value, list) and all(isinstance(line, str) for line in value)
    return is_number(value) if key in _NUMBERS else isinstance(value, str) or key not in _TEXTS


def valid_metrics(record: Record) -> Record:
    """Return the usable fields of a metrics record: numbers, None for NaN, the name of the peak, and time by cause."""
    found: Record = {key: value for key, value in record.items() if value is None or is_number(value)}
    if not _fits("time", found.get("time")):
        found.pop("time", None)
    if isinstance(peak := record.get("peak"), str):
        found["peak"] = peak
    if isinstance(spent := record.get("spent"), dict):
        found["spent"] = {str(part): seconds for part, seconds in spent.items() if is_number(seconds)}
    return found


def table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def readable(name: str) -> str:
    """Return a file name, which may be any bytes, as valid text."""
    return os.fsencode(name).decode(errors="replace")


def printable(text: str) -> str:
    """Return the text as one line that is safe for a terminal: no control characters."""
    return "".join(letter if letter.isprintable() else "�" for letter in re.sub(r"[\t\r\n]+ *", " ", text))

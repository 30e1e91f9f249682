"""What a file of a run directory says, as the types that whoever reads it counts on. A run directory may be damaged or a
stranger's: a field that is not what it should be is left out, as if it had not been written."""

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
_LATEST = 1e11  # seconds since 1970: what a calendar can hold


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def sound(record: Record) -> Record:
    """An event or a heart beat."""
    return {key: value for key, value in record.items() if _fits(key, value)}


def _fits(key: str, value: object) -> bool:
    if key == "time":
        return isinstance(value, int | float) and 0 <= value < _LATEST
    if key == "stack":
        return isinstance(value, list) and all(isinstance(line, str) for line in value)
    return is_number(value) if key in _NUMBERS else isinstance(value, str) or key not in _TEXTS


def figures(record: Record) -> Record:
    """A line of metrics: numbers, null where one was none, the peak's name, and the sums of where time went."""
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
    """The name of a file, which may be any bytes, as text that can be sent on."""
    return os.fsencode(name).decode(errors="replace")


def printable(text: str) -> str:
    """One line for a terminal: nothing in it moves the cursor or changes what was printed before."""
    return "".join(letter if letter.isprintable() else "�" for letter in re.sub(r"[\t\r\n]+ *", " ", text))

"""Append-only JSON lines that survive being killed in the middle of one.

Each record is one `write` of one line. When the file is opened again, a line that was cut short by a kill gets a newline, so
that it stays one broken line, which readers skip. A write error never stops training: a full disk is logged once, and
the next record is tried again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from argosy.untrusted import open_regular

Record = dict[str, Any]
_log = logging.getLogger(__name__)


class JsonlWriter:
    """Appends records to a JSONL file. `lost` counts records that could not be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._fd: int | None = None
        self._mid_line = False

    def write(self, record: Record) -> None:
        line = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        try:
            if self._fd is not None and os.fstat(self._fd).st_nlink == 0 and not self.path.exists():
                # Records written to a deleted file would be lost.
                self.close()
                _log.warning("%s was deleted while the run was writing it; a new file is started", self.path)
            if self._fd is None:
                self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._mid_line = _ends_mid_line(self._fd)
            if self._mid_line:
                line = b"\n" + line
            written = os.write(self._fd, line)
        except OSError as error:
            self._announce(error)
            return
        self._mid_line = written < len(line)
        if self._mid_line:
            self._announce(OSError("only part of a line was written; is the disk full?"))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _announce(self, error: OSError) -> None:
        self.lost += 1
        if self.lost == 1:
            _log.warning("%s cannot be written (%s); the run goes on without it", self.path, error)


def _ends_mid_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def read_jsonl(path: Path) -> Iterator[Record]:
    """Yield complete records in order. A broken or unfinished line is skipped."""
    if not path.exists():
        return
    with open_regular(path) as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def read_metrics(path: Path) -> dict[int, Record]:
    """Return one record for each step, in order.

    A resumed run logs some steps again: when the step number goes back, the records from there on belong to the attempt that
    died, and are dropped.
    """
    steps: dict[int, Record] = {}
    newest = -1
    for record in read_jsonl(path):
        step = record.get("step")
        if not isinstance(step, int):
            continue
        if step == newest and not (record.keys() & steps[step].keys()) - {"step", "time"}:
            # The record of a step's validation loss follows that of its training loss.
            steps[step] |= record
            continue
        if step <= newest:
            steps = {known: kept for known, kept in steps.items() if known < step}
        steps[step] = record
        newest = step
    return steps


def now() -> float:
    """Return the wall-clock time in seconds, rounded to milliseconds as in records."""
    return round(time.time(), 3)

"""The logs of ranks, `logs/<attempt>/<rank>.log`, for whoever reads them; `argosy.record.relay` writes them."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from argosy.record.jsonl import read_jsonl
from argosy.record.relay import BEGINNING, ENDING, MARK

_END_BYTES = 64 << 10  # of a log, in which its last lines are
_LOOK_S = 0.5
_BEGINS, _ENDS = ("start", "resume", "restart"), ("done", "interrupted", "failed", "non-finite", "gave-up")  # events


def newest_attempt(run: Path) -> Path | None:
    """The directory of the last start of a run that has left a log."""
    numbers = [int(path.name) for path in (run / "logs").glob("*") if path.name.isdecimal()]
    return run / "logs" / str(max(numbers)) if numbers else None


def pieces(attempt: Path, rank: int) -> list[Path]:
    """The files of a rank's log, in the order they were written in."""
    names = (f"{rank}.first.log", f"{rank}.before.log", f"{rank}.log")
    return [attempt / name for name in names if (attempt / name).exists()]


def read_log(run: Path, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
    """The lines of the newest attempt, or the last of them; to be followed, also those to come until the run has ended."""
    while not (found := _pieces_now(run, rank)) and follow and not _has_ended(run):
        time.sleep(_LOOK_S)
    lines: deque[str] = deque(maxlen=tail)
    file = None
    for path in found:
        file = path.open("rb")
        lines.extend(_whole_lines(file, last=not follow))
    yield from lines
    if follow and file is not None:
        yield from _lines_to_come(run, f"{rank}.log", file, ended=bool(lines) and lines[-1].startswith(ENDING))


def _pieces_now(run: Path, rank: int) -> list[Path]:
    attempt = newest_attempt(run)
    return [] if attempt is None else pieces(attempt, rank)


def _lines_to_come(run: Path, name: str, file: BinaryIO, *, ended: bool) -> Iterator[str]:
    """Of this file, and of the one that follows it when it is full or the run has begun anew."""
    while not (ended and _has_ended(run)):
        for line in _whole_lines(file):
            ended = line.startswith(ENDING)
            yield line
        attempt = newest_attempt(run)
        newest = None if attempt is None else attempt / name
        if newest is None or not newest.exists() or os.path.samestat(newest.stat(), os.fstat(file.fileno())):
            time.sleep(_LOOK_S)
        else:
            yield from _whole_lines(file, last=True)
            file, ended = newest.open("rb"), False


def _whole_lines(file: BinaryIO, *, last: bool = False) -> Iterator[str]:
    """Those that are finished; the last one too, where no more is to come."""
    while line := file.readline():
        if not line.endswith(b"\n") and not last:
            file.seek(-len(line), os.SEEK_CUR)
            return
        yield line.decode(errors="replace").rstrip("\n")


def _has_ended(run: Path) -> bool:
    """Whether it will not go on by itself."""
    kinds = [event.get("event") for event in read_jsonl(run / "events.jsonl")]
    return next((kind in _ENDS for kind in reversed(kinds) if kind in _BEGINS + _ENDS), False)


def of_last_start(lines: list[str]) -> list[str]:
    """A log may begin with what was said by starts that did not come to train."""
    begins = [i for i, line in enumerate(lines) if line.startswith(BEGINNING)]
    return lines[begins[-1] :] if begins else lines


def last_words(run: Path, rank: int, count: int = 3) -> list[str]:
    """The last lines that a rank wrote, each with the name of its log."""
    attempt = newest_attempt(run)
    if attempt is None:
        return []
    path = attempt / f"{rank}.log"
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _END_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    said = [line for line in of_last_start(lines) if line.strip() and not line.startswith(MARK)]
    return [f"{path.relative_to(run)}: {line[:300]}" for line in said[-count:]]

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
from argosy.untrusted import open_regular

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
    return [attempt / name for name in names if (attempt / name).is_file()]


def ranks_with_logs(attempt: Path) -> list[int]:
    names = {path.name.removesuffix(".log") for path in attempt.glob("*.log")}
    return sorted(int(name) for name in names if name.isdecimal())


def read_log(run: Path, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
    """The lines of the newest attempt, or the last of them; to be followed, also those to come until the run has ended."""
    lines: deque[str] = deque(maxlen=tail)
    at: tuple[Path, BinaryIO] | None = None  # an attempt, and a piece of its log
    ended = False
    while (following := _next_piece(run, rank, at)) is not None:
        at = following
        for line in _whole_lines(at[1], last=not follow):
            ended = _is_over(line, ended)
            lines.append(line)
    yield from lines
    while follow:
        over = ended and _has_ended(run)  # before a next piece is looked for: there is none any more
        following = _next_piece(run, rank, at)  # before the rest of this one is read: nothing is added to it any more
        for line in () if at is None else _whole_lines(at[1], last=following is not None):
            ended = _is_over(line, ended)
            yield line
        if following is not None:
            at = following
        elif over:
            return
        else:
            time.sleep(_LOOK_S)


def _is_over(line: str, before: bool) -> bool:
    """Whether the rank has ended, after this line: what it has started may speak longer than itself."""
    return line.startswith(ENDING) or (before and not line.startswith(BEGINNING))


def _next_piece(run: Path, rank: int, at: tuple[Path, BinaryIO] | None) -> tuple[Path, BinaryIO] | None:
    """The piece that was begun after this one, which has another name since, or is gone; or the first of a later attempt."""
    attempt = newest_attempt(run)
    if attempt is None:
        return None
    found = pieces(attempt, rank)
    place = -1
    if at is not None and attempt == at[0]:
        mine = os.fstat(at[1].fileno())
        gone = 0 if found and found[0].name == f"{rank}.first.log" else -1  # the run was moved aside, and begun anew
        place = next((place for place, path in enumerate(found) if _is_same(path, mine)), gone)
    try:
        file = open_regular(found[place + 1], within=run / "logs")
    except (IndexError, OSError):  # there is none, it gets another name just now, or it is no log
        return None
    return (attempt, file) if pieces(attempt, rank) == found else _next_piece(run, rank, at)


def _is_same(path: Path, mine: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), mine)
    except FileNotFoundError:
        return False


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


def last_lines(path: Path, run: Path) -> list[str]:
    """Return the last lines of a log of `run`; none where it is no regular file, or a link out of
    the folder of the run it lies in, which may itself be a link."""
    try:
        with open_regular(path, within=run / path.relative_to(run).parts[0]) as file:
            start = max(0, file.seek(0, os.SEEK_END) - _END_BYTES)
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[1:] if start else lines  # the first may be half of one


def last_words(run: Path, rank: int, count: int = 3) -> list[str]:
    """The last lines that a rank wrote, each with the name of its log."""
    attempt = newest_attempt(run)
    path = run / "none" if attempt is None else attempt / f"{rank}.log"
    said = [line for line in of_last_start(last_lines(path, run)) if line.strip() and not line.startswith(MARK)]
    return [f"{path.relative_to(run)}: {line[:300]}" for line in said[-count:]]

"""Reading the logs of ranks, `logs/<attempt>/<rank>.log`. `argosy.record.relay` writes them."""

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

# Bytes read from the end of a log for its last lines.
_END_BYTES = 64 << 10
_POLL_S = 0.5
# Kinds of events that start and end an attempt.
_BEGINS, _ENDS = ("start", "resume", "restart"), ("done", "interrupted", "failed", "non-finite", "gave-up")


def newest_attempt(run: Path) -> Path | None:
    """Return the log directory of the newest attempt that has one."""
    numbers = [int(path.name) for path in (run / "logs").glob("*") if path.name.isdecimal()]
    return run / "logs" / str(max(numbers)) if numbers else None


def pieces(attempt: Path, rank: int) -> list[Path]:
    """Return the files of a rank's log, oldest first."""
    names = (f"{rank}.first.log", f"{rank}.before.log", f"{rank}.log")
    return [attempt / name for name in names if (attempt / name).is_file()]


def ranks_with_logs(attempt: Path) -> list[int]:
    names = {path.name.removesuffix(".log") for path in attempt.glob("*.log")}
    return sorted(int(name) for name in names if name.isdecimal())


def read_log(run: Path, rank: int, *, tail: int | None = None, follow: bool = False) -> Iterator[str]:
    """Yield the lines of a rank's log of the newest attempt.

    Args:
        tail: only the last lines, this many.
        follow: wait for more lines, also of later attempts, until the run has ended.
    """
    lines: deque[str] = deque(maxlen=tail)
    # The attempt's directory, and the open file of its log.
    at: tuple[Path, BinaryIO] | None = None
    ended = False
    while (following := _next_piece(run, rank, at)) is not None:
        at = following
        for line in _whole_lines(at[1], last=not follow):
            ended = _is_over(line, ended)
            lines.append(line)
    yield from lines
    while follow:
        # The order matters. If the run has ended before the search for a next file, there will be none. If a next file
        # exists before the rest of this one is read, nothing more is added to this one.
        over = ended and _has_ended(run)
        following = _next_piece(run, rank, at)
        for line in () if at is None else _whole_lines(at[1], last=following is not None):
            ended = _is_over(line, ended)
            yield line
        if following is not None:
            at = following
        elif over:
            return
        else:
            time.sleep(_POLL_S)


def _is_over(line: str, before: bool) -> bool:
    """Return whether the rank has ended after this line. Its child processes may write lines after its end."""
    return line.startswith(ENDING) or (before and not line.startswith(BEGINNING))


def _next_piece(run: Path, rank: int, at: tuple[Path, BinaryIO] | None) -> tuple[Path, BinaryIO] | None:
    """Open the file that follows `at`: the next file of the attempt's log, or the first of a later attempt.

    The file of `at` may have been renamed by log rotation, or deleted.
    """
    attempt = newest_attempt(run)
    if attempt is None:
        return None
    found = pieces(attempt, rank)
    place = -1
    if at is not None and attempt == at[0]:
        mine = os.fstat(at[1].fileno())
        # If the file is gone: rotation deleted it and the first file is older, or the run was archived and started anew.
        gone = 0 if found and found[0].name == f"{rank}.first.log" else -1
        place = next((place for place, path in enumerate(found) if _is_same(path, mine)), gone)
    try:
        file = open_regular(found[place + 1], within=run / "logs")
    except (IndexError, OSError):
        # There is no next file, it is being renamed right now, or it is not a regular file.
        return None
    return (attempt, file) if pieces(attempt, rank) == found else _next_piece(run, rank, at)


def _is_same(path: Path, mine: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), mine)
    except FileNotFoundError:
        return False


def _whole_lines(file: BinaryIO, *, last: bool = False) -> Iterator[str]:
    """Yield complete lines; with `last`, also an unfinished last line."""
    while line := file.readline():
        if not line.endswith(b"\n") and not last:
            file.seek(-len(line), os.SEEK_CUR)
            return
        yield line.decode(errors="replace").rstrip("\n")


def _has_ended(run: Path) -> bool:
    """Return whether the run's newest start or end event is an end."""
    kinds = [event.get("event") for event in read_jsonl(run / "events.jsonl")]
    return next((kind in _ENDS for kind in reversed(kinds) if kind in _BEGINS + _ENDS), False)


def of_last_start(lines: list[str]) -> list[str]:
    """Return the lines of the last start. A log may begin with lines of starts that failed before training."""
    begins = [i for i, line in enumerate(lines) if line.startswith(BEGINNING)]
    return lines[begins[-1] :] if begins else lines


def last_lines(path: Path, run: Path) -> list[str]:
    """Return the last lines of a log of `run`.

    Returns none if the log is not a regular file, or is a link that leads out of its directory. That directory may itself
    be a link.
    """
    try:
        with open_regular(path, within=run / path.relative_to(run).parts[0]) as file:
            start = max(0, file.seek(0, os.SEEK_END) - _END_BYTES)
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    # The first line may be cut.
    return lines[1:] if start else lines


def last_words(run: Path, rank: int, count: int = 3) -> list[str]:
    """Return the last lines that a rank wrote, each with the name of its log in front."""
    attempt = newest_attempt(run)
    path = run / "none" if attempt is None else attempt / f"{rank}.log"
    lines = [line for line in of_last_start(last_lines(path, run)) if line.strip() and not line.startswith(MARK)]
    return [f"{path.relative_to(run)}: {line[:300]}" for line in lines[-count:]]

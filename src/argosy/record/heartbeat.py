"""Where a rank is, for whoever watches it: `heartbeat/<rank>.json`, rewritten every second or so.

    {"rank": 3, "host": "node7", "pid": 4711, "attempt": 0, "step": 812, "phase": "forward_backward", "phase_s": 0.8,
     "longest_s": 0.9, "progress": 3251, "state": "R", "memory_bytes": 2.1e9, "collective": null, "time": …, "monotonic": …, "beat": 640, "alive": true}

`beat` and `time` move as long as the host lives: they prove that somebody looks. `progress` counts the phases the rank has
entered: it proves that the rank moves. `phase_s` is how long it has been in this one, by a clock that no one sets, and `longest_s` how long
it was in it at most since it began (0: never to its end). When the
rank ends, well or not, the last record says `alive: false`. The writer is `argosy.record.pulse`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import orjson

from argosy.record import pulse
from argosy.record.pulse import PAGE_BYTES, Page, RankProgress
from argosy.untrusted import MIB, read_object

Phase = Literal["start", "load", "data", "forward_backward", "optimizer", "evaluate", "save", "last_save", "done"]
_FAREWELL_S = 2.0
_log = logging.getLogger(__name__)


class Heartbeat:
    """`enter` tells where the rank is, at the cost of a few stores; `publish` starts the process that writes it down. Where
    `page` names a file, a supervisor reads it too."""

    def __init__(self, rank: int = 0, *, attempt: int = 0, page: Path | None = None) -> None:
        self._rank, self._attempt = rank, attempt
        self._fd = _memory(page)
        self._page = Page(self._fd)
        self._progress = RankProgress(0, 0, 0, time.monotonic(), 0.0, "start")
        self._longest: dict[str, float] = {}
        self._writer: subprocess.Popen[bytes] | None = None
        self._page.write(self._progress)

    def publish(self, directory: Path, world_size: int = 1, *, stalls: tuple[Path, float] | None = None) -> None:
        """Write `directory/<rank>.json` from now on; with `stalls` also an alert to those events, where nothing moves for so many
        seconds. A failure to do so is no reason not to train."""
        interval = interval_s(world_size)
        facts = {
            "rank": self._rank, "host": os.uname().nodename, "pid": os.getpid(), "attempt": self._attempt,
            "collective": None,
        }  # fmt: skip
        arguments = [str(self._fd), str(directory / f"{self._rank}.json"), str(interval), orjson.dumps(facts).decode()]
        arguments += [] if stalls is None else [str(part) for part in stalls]
        try:
            directory.mkdir(exist_ok=True)
            self._writer = subprocess.Popen(
                [sys.executable, "-I", "-S", pulse.__file__, *arguments], stdin=subprocess.PIPE, pass_fds=(self._fd,)
            )
        except OSError as error:
            _log.warning("no heartbeat is written: %s", error)

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """The rank begins a phase, of a step unless it is the same one."""
        now, before = time.monotonic(), self._progress
        if before.step > before.first + 1:  # the first step pays for warming up
            self._longest[before.phase] = max(self._longest.get(before.phase, 0.0), now - before.since)
        step = before.step if step is None else step
        longest = self._longest.get(phase, 0.0)
        self._progress = RankProgress(before.entered + 1, step, before.first, now, longest, phase)
        self._page.write(self._progress)

    @property
    def step(self) -> int:
        """Under way, or done last."""
        return self._progress.step

    def begin(self, first: int) -> None:
        """Step `first` is done, and this attempt goes on from there."""
        self._progress = self._progress._replace(first=first, step=first)
        self._page.write(self._progress)

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._writer.communicate(timeout=_FAREWELL_S)  # its input ends, and with it the writer
            self._writer = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.enter("done")
        self.close()


def interval_s(ranks: int) -> float:
    """Between two beats: a shared file system has to bear those of all ranks."""
    return min(15.0, max(1.0, ranks / 64))


def _memory(page: Path | None) -> int:
    """A page of memory as a file, without a name unless it is given one."""
    if page is not None:
        fd = os.open(page, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    elif hasattr(os, "memfd_create"):
        fd = os.memfd_create("argosy-heartbeat")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, PAGE_BYTES)
    return fd


def read_heartbeats(directory: Path) -> dict[int, dict[str, Any]]:
    """The newest record of each rank; one that is being replaced or broken is left out."""
    found: dict[int, dict[str, Any]] = {}
    for file in directory.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = read_object(file, MIB, within=directory)
            found[int(record["rank"])] = record
    return dict(sorted(found.items()))


def clear_heartbeats(directory: Path) -> None:
    """Forget the ranks of an earlier start, of which there may have been more."""
    for file in (*directory.glob("*.json"), *directory.glob(".*.json.*")):
        file.unlink(missing_ok=True)

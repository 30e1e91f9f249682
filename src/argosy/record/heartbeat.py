"""The heartbeat of a rank: `heartbeat/<rank>.json`, rewritten every 1 to 15 seconds.

    {"rank": 3, "host": "node7", "pid": 4711, "attempt": 0, "step": 812, "phase": "forward_backward", "phase_s": 0.8,
     "longest_s": 0.9, "progress": 3251, "state": "R", "memory_bytes": 2.1e9, "collective": null, "time": …, "monotonic": …, "beat": 640, "alive": true}

`beat` and `time` grow as long as the writer lives: they prove that the host is alive. `progress` counts the phases and the
parts of phases that the rank has entered: it proves that the rank makes progress. `phase_s` is the time in the current phase by the monotonic clock.
`longest_s` is the longest time that this phase, or a part of it, has taken in this attempt (0: it has not finished once). When the rank ends,
with or without an error, the last record says `alive: false`. The writer is a process of its own, `argosy.record.pulse`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import orjson

from argosy.record import pulse
from argosy.record.pulse import PAGE_BYTES, Page, RankProgress
from argosy.untrusted import MIB

Phase = Literal[
    "start", "load", "data", "forward_backward", "optimizer", "evaluate", "write_samples", "score_tasks", "save", "last_save", "done",
]  # fmt: skip
_WRITER_EXIT_S = 2.0
_log = logging.getLogger(__name__)


class Heartbeat:
    """The current phase of a rank, in shared memory.

    `enter` stores the phase, at the cost of a few memory writes. `publish` starts the process that writes the heartbeat file.

    Args:
        attempt: how often the supervisor has restarted the ranks.
        page: file that backs the shared memory, for a supervisor to read; without it the memory is anonymous.
    """

    def __init__(self, rank: int = 0, *, attempt: int = 0, page: Path | None = None) -> None:
        self._rank, self._attempt = rank, attempt
        self._fd = _memory(page)
        self._page = Page(self._fd)
        self._progress = RankProgress(0, 0, 0, time.monotonic(), 0.0, "start")
        self._longest: dict[str, float] = {}
        # The longest time between two beats of the current phase.
        self._longest_part = 0.0
        self._writer: subprocess.Popen[bytes] | None = None
        self._page.write(self._progress)

    def publish(self, directory: Path, world_size: int = 1, *, stalls: tuple[Path, float] | None = None) -> None:
        """Start writing `directory/<rank>.json`. A failure is logged and does not stop training.

        Args:
            stalls: (events file, seconds): also append a stall alert to that file when no phase has ended for that long.
        """
        interval = interval_s(world_size)
        facts = {
            "rank": self._rank, "host": os.uname().nodename, "pid": os.getpid(), "attempt": self._attempt,
            "collective": None,
        }  # fmt: skip
        try:
            directory.mkdir(exist_ok=True)
            # The writer has the directory by its descriptor, so it cannot write into the directory of a later start.
            place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                arguments = [
                    str(self._fd),
                    str(place),
                    f"{self._rank}.json",
                    str(interval),
                    orjson.dumps(facts).decode(),
                ]
                arguments += [] if stalls is None else [str(part) for part in stalls]
                command = [sys.executable, "-I", "-S", pulse.__file__, *arguments]
                self._writer = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(self._fd, place))
            finally:
                os.close(place)
        except OSError as error:
            _log.warning("no heartbeat is written: %s", error)

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Record that the rank begins `phase`, of step `step` or of the same step as before."""
        now, before = time.monotonic(), self._progress
        # The first step includes warm-up, and would make the stall limit too long.
        if before.step > before.first + 1:
            took = max(self._longest_part, now - before.since)
            self._longest[before.phase] = max(self._longest.get(before.phase, 0.0), took)
        self._longest_part = 0.0
        step = before.step if step is None else step
        longest = self._longest.get(phase, 0.0)
        self._progress = RankProgress(before.entered + 1, step, before.first, now, longest, phase)
        self._page.write(self._progress)

    def beat(self) -> None:
        """Record progress inside a phase of many parts. The stall limit then applies to a part instead of the whole phase.

        The longest part counts when the phase ends, so a first time keeps the long limit although its first part was short.
        """
        now, before = time.monotonic(), self._progress
        self._longest_part = max(self._longest_part, now - before.since)
        self._progress = before._replace(entered=before.entered + 1, since=now)
        self._page.write(self._progress)

    @property
    def step(self) -> int:
        """The step in progress, or the last one that was finished."""
        return self._progress.step

    def begin(self, first: int) -> None:
        """Record that this attempt resumes after step `first`."""
        self._progress = self._progress._replace(first=first, step=first)
        self._page.write(self._progress)

    def close(self) -> None:
        if self._writer is not None:
            # The writer exits when its standard input is closed.
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._writer.communicate(timeout=_WRITER_EXIT_S)
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
    """Return the seconds between two heartbeats: longer with more ranks, since all of them write to one shared file system."""
    return min(15.0, max(1.0, ranks / 64))


def _memory(page: Path | None) -> int:
    """Return a file descriptor of one page of memory: of the file `page`, or anonymous."""
    if page is not None:
        fd = os.open(page, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    elif hasattr(os, "memfd_create"):
        fd = os.memfd_create("argosy-heartbeat")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, PAGE_BYTES)
    return fd


class HeartbeatFiles:
    """The heartbeats of a run's ranks. A look reads only the files that have changed since the last one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # By file name: what tells whether the file has changed, and its record.
        self._seen: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def read(self) -> dict[int, dict[str, Any]]:
        """Return the newest heartbeat of each rank. A file that is broken or just being replaced is skipped."""
        seen, found = self._seen, dict[int, dict[str, Any]]()
        self._seen = {}
        with contextlib.suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.name.endswith(".json"):
                    continue
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    status = entry.stat(follow_symlinks=False)
                    version = (status.st_mtime_ns, status.st_size, status.st_ino)
                    before = seen.get(entry.name)
                    record = before[1] if before is not None and before[0] == version else _record(entry.path)
                    found[int(record["rank"])] = record
                    self._seen[entry.name] = (version, record)
        return dict(sorted(found.items()))


def read_heartbeats(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the newest heartbeat of each rank."""
    return HeartbeatFiles(directory).read()


def _record(path: str) -> dict[str, Any]:
    """Return the JSON object in a small file of its own: no link, no pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")
        document = orjson.loads(os.read(fd, MIB))
    finally:
        os.close(fd)
    if not isinstance(document, dict):
        raise TypeError("it is not an object")
    return document


def clear_heartbeats(directory: Path) -> None:
    """Remove the heartbeats of earlier starts, which may have had more ranks, with their directory.

    A writer of an earlier start that was paused, and goes on now, still has that directory and writes nothing into the next one.
    """
    with contextlib.suppress(FileNotFoundError):
        directory.rename(directory.with_name(f".{directory.name}-{uuid.uuid4().hex}"))
    for earlier in directory.parent.glob(f".{directory.name}-*"):
        # A file that such a writer adds meanwhile keeps the directory until the next start.
        shutil.rmtree(earlier, ignore_errors=True)
    directory.mkdir(exist_ok=True)

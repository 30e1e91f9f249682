"""The process beside a rank that writes its heartbeat: a separate one, so that neither a held GIL nor a stopped trainer stops it.

The rank tells where it is by plain stores into a page both processes map. This file runs as a script of its own, without
Argosy, torch or site packages, so that it starts in milliseconds and needs a few megabytes: only the standard library
may be imported here.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import struct
import sys
import time
from typing import Any, NamedTuple

PHASES = ("start", "load", "data", "forward_backward", "optimizer", "evaluate", "save", "done")
PAGE_BYTES = 4096
_LAYOUT = struct.Struct("<QQqqddQ")  # sequence, entered, step, first, since, longest, phase


class Progress(NamedTuple):
    """Where a rank is."""

    entered: int  # phases so far: a number that grows while the rank moves
    step: int  # under way, or done last
    first: int  # the step this attempt went on from
    since: float  # monotonic clock of the host, when this phase began
    longest: float  # seconds the phase took at most, in this attempt after its first step; 0: not known yet
    phase: str


class Page:
    """Shared memory with one writer. A number before and after each change tells readers that they caught it half-made."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, PAGE_BYTES)
        self._sequence = 0

    def write(self, progress: Progress) -> None:
        entered, step, first, since, longest, phase = progress
        fields = (entered, step, first, since, longest, PHASES.index(phase))
        self._sequence += 2
        struct.pack_into("<Q", self._memory, 0, self._sequence - 1)
        _LAYOUT.pack_into(self._memory, 0, self._sequence - 1, *fields)
        struct.pack_into("<Q", self._memory, 0, self._sequence)

    def read(self) -> Progress | None:
        """None where nothing was written yet."""
        for _ in range(100):
            before, entered, step, first, since, longest, phase = _LAYOUT.unpack_from(self._memory, 0)
            if before % 2 == 0 and struct.unpack_from("<Q", self._memory, 0)[0] == before:
                return Progress(entered, step, first, since, longest, PHASES[phase]) if before else None
            time.sleep(0.0001)
        return None


def process_state(pid: int) -> tuple[str, int] | None:
    """(R running, S sleeping, D waiting for a device, T stopped, Z dead; resident bytes), where /proc tells; None: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def _beat(page: Page, facts: dict[str, Any], beat: int, trainer: int) -> dict[str, Any] | None:
    progress = page.read()
    if progress is None:
        return None
    state, resident = process_state(trainer) or ("?", 0)
    now = time.monotonic()
    return facts | {
        "step": progress.step,
        "phase": progress.phase,
        "phase_s": round(now - progress.since, 3),
        "progress": progress.entered,
        "state": state,
        "memory_bytes": resident,
        "time": round(time.time(), 3),
        "monotonic": round(now, 3),
        "beat": beat,
    }


def _write(path: str, record: dict[str, Any]) -> None:
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    try:
        with open(temporary, "w") as file:
            json.dump(record, file)
        os.replace(temporary, path)
    except OSError:
        pass  # the disk may be full or gone: the next beat tries again


def main() -> None:
    """FD PATH INTERVAL FACTS: until standard input, which the rank holds open, ends."""
    fd, path, interval, facts = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), json.loads(sys.argv[4])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the trainer, which may have much left to do
    page, trainer, beat = Page(fd), int(facts["pid"]), 0
    ended = False
    while not ended:
        beat += 1
        ended = bool(select.select([0], [], [], interval if beat > 1 else 0)[0]) or os.getppid() != trainer
        record = _beat(page, facts, beat, trainer)
        if record is not None:
            _write(path, record | {"alive": not ended})


if __name__ == "__main__":
    main()

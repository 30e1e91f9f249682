"""The heartbeat writer of a rank: a process of its own, which neither a held GIL nor a stopped trainer can block.

The rank stores its current phase in a memory page that both processes map. The writer of rank 0 also appends an alert to the
run's events when rank 0 stalls, which happens when any rank stalls. This file runs as a script, without Argosy, torch or site
packages, so that it starts in milliseconds and needs a few megabytes: import only the standard library here.
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
from functools import partial
from typing import Any, NamedTuple

PHASES = (
    "start", "load", "data", "forward_backward", "optimizer", "evaluate", "write_samples", "score_tasks", "save", "last_save", "done",
)  # fmt: skip
PAGE_BYTES = 4096
# sequence, entered, step, first, since, longest, phase
_LAYOUT = struct.Struct("<QQqqddQ")


class RankProgress(NamedTuple):
    """The step and phase of a rank.

    entered: how many phases the rank has entered; it grows while the rank makes progress.
    step: the step in progress, or the last one that was finished.
    first: the step that this attempt resumed after.
    since: when this phase began, by the host's monotonic clock.
    longest: the longest time in seconds that this phase took after the first step of this attempt; 0: not known yet.
    """

    entered: int
    step: int
    first: int
    since: float
    longest: float
    phase: str


class Page:
    """A shared memory page with one writer, a seqlock: an odd sequence number tells readers that a write is in progress."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, PAGE_BYTES)
        self._sequence = 0

    def write(self, progress: RankProgress) -> None:
        entered, step, first, since, longest, phase = progress
        fields = (entered, step, first, since, longest, PHASES.index(phase))
        self._sequence += 2
        struct.pack_into("<Q", self._memory, 0, self._sequence - 1)
        _LAYOUT.pack_into(self._memory, 0, self._sequence - 1, *fields)
        struct.pack_into("<Q", self._memory, 0, self._sequence)

    def read(self) -> RankProgress | None:
        """Return the rank's progress, or None if nothing was written yet."""
        for _ in range(100):
            before, entered, step, first, since, longest, phase = _LAYOUT.unpack_from(self._memory, 0)
            if before % 2 == 0 and struct.unpack_from("<Q", self._memory, 0)[0] == before:
                return RankProgress(entered, step, first, since, longest, PHASES[phase]) if before else None
            time.sleep(0.0001)
        return None


def process_state(pid: int) -> tuple[str, int] | None:
    """Return the state and resident bytes of a process from /proc, or None if it is gone.

    States: R running, S sleeping, D uninterruptible (device or file system), T stopped, Z zombie.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def _beat(progress: RankProgress, facts: dict[str, Any], beat: int, trainer: int) -> dict[str, Any]:
    state, resident = process_state(trainer) or ("?", 0)
    now = time.monotonic()
    return facts | {
        "step": progress.step,
        "phase": progress.phase,
        "phase_s": round(now - progress.since, 3),
        "longest_s": round(progress.longest, 3),
        "progress": progress.entered,
        "state": state,
        "memory_bytes": resident,
        "time": round(time.time(), 3),
        "monotonic": round(now, 3),
        "beat": beat,
    }


def _write(directory: int, name: str, record: dict[str, Any]) -> None:
    temporary = f".{name}.{os.getpid()}"
    try:
        with open(temporary, "w", opener=partial(os.open, mode=0o666, dir_fd=directory)) as file:
            json.dump(record, file)
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        # The disk may be full or gone: the next heartbeat tries again. Or the directory is gone, because the run was started again.
        pass


class Stalls:
    """Appends a stall alert to the run's events, once for each stall.

    A rank stalls when it stays in one phase for longer than `after_s` seconds and than four times the longest time the phase
    took before. Where that is not known, as while the rank loads or compiles, the limit is three times `after_s`.
    """

    def __init__(self, events: str, heartbeats: int, after_s: float) -> None:
        self._events, self._heartbeats, self._after_s = events, heartbeats, after_s
        self._alerted = -1

    def look(self, progress: RankProgress) -> None:
        seconds = time.monotonic() - progress.since
        if (
            progress.phase == "done"
            or progress.entered == self._alerted
            or seconds < (max(self._after_s, 4 * progress.longest) if progress.longest else 3 * self._after_s)
        ):
            return
        self._alerted = progress.entered
        alert = {"event": "alert", "step": progress.step, "time": round(time.time(), 3), "alert": "stall"}
        alert |= self._furthest_behind(seconds)
        sys.stderr.write(f"alert at step {progress.step}: {alert['text']}\n")
        sys.stderr.flush()
        try:
            with open(self._events, "ab", buffering=0) as file:
                file.write(json.dumps(alert).encode() + b"\n")
        except OSError:
            # The alert is on standard error already.
            pass

    def _furthest_behind(self, seconds: float) -> dict[str, Any]:
        """Return the alert's text and the rank that is furthest behind, from the heartbeats of all ranks."""
        text, beats = f"nothing has moved for {seconds:.0f} s", []
        for name in os.listdir(self._heartbeats):
            try:
                if name.endswith(".json") and not name.startswith("."):
                    with open(name, opener=partial(os.open, dir_fd=self._heartbeats)) as file:
                        beats.append(json.load(file))
            except (OSError, ValueError):
                continue
        if not beats:
            return {"text": text}
        last = min(beats, key=lambda beat: (beat.get("step", 0), beat.get("progress", 0)))
        where = f"rank {last.get('rank')} on {last.get('host')} is furthest behind, at step {last.get('step')} in {last.get('phase')}"
        return {"text": f"{text}; {where}", "rank": last.get("rank")}


def main() -> None:
    """Write heartbeats until standard input, which the rank holds open, ends. Arguments: PAGE_FD DIRECTORY_FD
    NAME INTERVAL FACTS [EVENTS SECONDS]."""
    fd, directory, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    interval, facts = float(sys.argv[4]), json.loads(sys.argv[5])
    stalls = Stalls(sys.argv[6], directory, float(sys.argv[7])) if len(sys.argv) > 6 else None
    # These signals are for the trainer, which may still have a checkpoint to save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    page, trainer, beat = Page(fd), int(facts["pid"]), 0
    ended = False
    while not ended:
        beat += 1
        ended = bool(select.select([0], [], [], interval if beat > 1 else 0)[0]) or os.getppid() != trainer
        progress = page.read()
        if progress is not None:
            _write(directory, name, _beat(progress, facts, beat, trainer) | {"alive": not ended})
            if stalls is not None and not ended:
                stalls.look(progress)


if __name__ == "__main__":
    main()

"""The process beside a rank that writes its heartbeat: a separate one, so that neither a held GIL nor a stopped trainer stops it.

The rank tells where it is by plain stores into a page both processes map. Beside the first rank it also puts an alert on the
record when that stands still, as it does when any rank does. This file runs as a script of its own, without
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

PHASES = ("start", "load", "data", "forward_backward", "optimizer", "evaluate", "save", "last_save", "done")
PAGE_BYTES = 4096
_LAYOUT = struct.Struct("<QQqqddQ")  # sequence, entered, step, first, since, longest, phase


class RankProgress(NamedTuple):
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

    def write(self, progress: RankProgress) -> None:
        entered, step, first, since, longest, phase = progress
        fields = (entered, step, first, since, longest, PHASES.index(phase))
        self._sequence += 2
        struct.pack_into("<Q", self._memory, 0, self._sequence - 1)
        _LAYOUT.pack_into(self._memory, 0, self._sequence - 1, *fields)
        struct.pack_into("<Q", self._memory, 0, self._sequence)

    def read(self) -> RankProgress | None:
        """None where nothing was written yet."""
        for _ in range(100):
            before, entered, step, first, since, longest, phase = _LAYOUT.unpack_from(self._memory, 0)
            if before % 2 == 0 and struct.unpack_from("<Q", self._memory, 0)[0] == before:
                return RankProgress(entered, step, first, since, longest, PHASES[phase]) if before else None
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


def _write(path: str, record: dict[str, Any]) -> None:
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    try:
        with open(temporary, "w") as file:
            json.dump(record, file)
        os.replace(temporary, path)
    except OSError:
        pass  # the disk may be full or gone: the next beat tries again


class Stalls:
    """An alert in the run's events, once for each time that the rank stays in one phase for longer than `after_s` seconds, and
    than four times the longest it took before; three times as long where that is not known, as while it loads or compiles."""

    def __init__(self, events: str, heartbeats: str, after_s: float) -> None:
        self._events, self._heartbeats, self._after_s = events, heartbeats, after_s
        self._told = -1

    def look(self, progress: RankProgress) -> None:
        seconds = time.monotonic() - progress.since
        if (
            progress.phase == "done"
            or progress.entered == self._told
            or seconds < (max(self._after_s, 4 * progress.longest) if progress.longest else 3 * self._after_s)
        ):
            return
        self._told = progress.entered
        alert = {"event": "alert", "step": progress.step, "time": round(time.time(), 3), "alert": "stall"}
        alert |= self._behind(seconds)
        sys.stderr.write(f"alert at step {progress.step}: {alert['text']}\n")
        sys.stderr.flush()
        try:
            with open(self._events, "ab", buffering=0) as file:
                file.write(json.dumps(alert).encode() + b"\n")
        except OSError:
            pass  # whoever reads the terminal has it

    def _behind(self, seconds: float) -> dict[str, Any]:
        """In words, who is furthest behind, and where."""
        text, beats = f"nothing has moved for {seconds:.0f} s", []
        for name in os.listdir(self._heartbeats):
            try:
                if name.endswith(".json") and not name.startswith("."):
                    with open(os.path.join(self._heartbeats, name)) as file:
                        beats.append(json.load(file))
            except (OSError, ValueError):
                continue
        if not beats:
            return {"text": text}
        last = min(beats, key=lambda beat: (beat.get("step", 0), beat.get("progress", 0)))
        where = f"rank {last.get('rank')} on {last.get('host')} is furthest behind, at step {last.get('step')} in {last.get('phase')}"
        return {"text": f"{text}; {where}", "rank": last.get("rank")}


def main() -> None:
    """FD PATH INTERVAL FACTS [EVENTS SECONDS]: until standard input, which the rank holds open, ends."""
    fd, path, interval, facts = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), json.loads(sys.argv[4])
    stalls = Stalls(sys.argv[5], os.path.dirname(path), float(sys.argv[6])) if len(sys.argv) > 5 else None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the trainer, which may have much left to do
    page, trainer, beat = Page(fd), int(facts["pid"]), 0
    ended = False
    while not ended:
        beat += 1
        ended = bool(select.select([0], [], [], interval if beat > 1 else 0)[0]) or os.getppid() != trainer
        progress = page.read()
        if progress is not None:
            _write(path, _beat(progress, facts, beat, trainer) | {"alive": not ended})
            if stalls is not None and not ended:
                stalls.look(progress)


if __name__ == "__main__":
    main()

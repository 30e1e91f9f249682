"""The age of each rank's heartbeat by the local clock: a heartbeat that has changed since the last look is new.

Clocks of machines may differ by minutes. After a single look, the time in the heartbeat is all there is; a caller with time
waits for the next heartbeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from argosy.record.heartbeat import interval_s
from argosy.record.jsonl import Record

# A heartbeat older than this may come from a machine with another clock.
_DOUBTFUL_S = 20.0
# Time until a shared file system shows a change.
_STORAGE_S = 5.0


class HeartbeatAges:
    """The last heartbeat of each rank, and when it was first seen."""

    def __init__(self) -> None:
        # By rank: the heartbeat's identity, when it was first seen, and whether it changed while we looked.
        self._beats: dict[int, tuple[object, float, bool]] = {}
        self._looked = time.monotonic()

    def with_ages(self, beats: dict[int, Record]) -> dict[int, Record]:
        """Return the heartbeats, each with its age `age_s` in seconds."""
        now, since = time.monotonic(), self._looked
        self._looked = now
        return {rank: beat | {"age_s": self._age(rank, beat, now, since)} for rank, beat in beats.items()}

    def _age(self, rank: int, beat: Record, now: float, since: float) -> float:
        # A heartbeat from the future comes from another clock.
        stated_s = abs(time.time() - float(beat.get("time", 0.0)))
        mark = (beat.get("host"), beat.get("pid"), beat.get("beat"))
        before, at, heard = self._beats.get(rank, (None, now, False))
        if before != mark:
            heard = before is not None
            # The heartbeat was written after the last look.
            at = now - min(stated_s, now - since) if heard else now
            self._beats[rank] = (mark, at, heard)
        return now - at if heard else max(stated_s, now - at)


def wait_for_heartbeat(heartbeats: Callable[[], dict[int, Record]]) -> None:
    """Wait for a new heartbeat if none is known to be recent, for at most one interval."""
    beats = [beat for beat in heartbeats().values() if beat.get("alive")]
    between_s = interval_s(len(beats))
    deadline = time.monotonic() + 1.5 * between_s + _STORAGE_S
    while beats and min(beat["age_s"] for beat in beats) > _DOUBTFUL_S and time.monotonic() < deadline:
        time.sleep(between_s / 5)
        beats = [beat for beat in heartbeats().values() if beat.get("alive")]

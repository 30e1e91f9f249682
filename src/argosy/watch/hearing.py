"""How long ago each rank was heard of, by our own clock: a heart beat that has changed since we last looked is heard now.

Clocks of machines may differ by minutes. Where we have looked once only, the time in the beat is all there is to go by; who has
time for a second look waits for the next beat.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from argosy.record.heartbeat import interval_s
from argosy.record.jsonl import Record

_DOUBTFUL_S = 20.0  # a beat older than this may as well be one by another clock
_STORAGE_S = 5.0  # that a shared file system may take to show a change


class Hearing:
    def __init__(self) -> None:
        # Of each rank the last beat, since when we know it, and whether it came while we looked.
        self._beats: dict[int, tuple[object, float, bool]] = {}
        self._looked = time.monotonic()

    def note(self, beats: dict[int, Record]) -> dict[int, Record]:
        """The same, each with its age in seconds."""
        now, since = time.monotonic(), self._looked
        self._looked = now
        return {rank: beat | {"age_s": self._age(rank, beat, now, since)} for rank, beat in beats.items()}

    def _age(self, rank: int, beat: Record, now: float, since: float) -> float:
        told = abs(time.time() - float(beat.get("time", 0.0)))  # one from the future is by another clock
        mark = (beat.get("host"), beat.get("pid"), beat.get("beat"))
        before, at, heard = self._beats.get(rank, (None, now, False))
        if before != mark:
            heard = before is not None
            at = now - min(told, now - since) if heard else now  # it came after our last look
            self._beats[rank] = (mark, at, heard)
        return now - at if heard else max(told, now - at)


def listen(heartbeats: Callable[[], dict[int, Record]]) -> None:
    """Until a beat is heard, where none is known to be recent: no longer than one takes."""
    beats = [beat for beat in heartbeats().values() if beat.get("alive")]
    between_s = interval_s(len(beats))
    deadline = time.monotonic() + 1.5 * between_s + _STORAGE_S
    while beats and min(beat["age_s"] for beat in beats) > _DOUBTFUL_S and time.monotonic() < deadline:
        time.sleep(between_s / 5)
        beats = [beat for beat in heartbeats().values() if beat.get("alive")]

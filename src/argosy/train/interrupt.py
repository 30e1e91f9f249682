"""Ctrl-C, SIGTERM and SIGUSR1: the first asks for an orderly stop after this step, the second ends the process at once.

SIGUSR1 is what HyperPod's agent sends to end a run in order, and many Slurm scripts before the time limit. One request may arrive
twice: Slurm signals every process of a job, and the agent passes on what it gets. What comes within less than half a second of the
first is the first.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_SAME_S = 0.4


class Interrupt:
    """`with Interrupt() as interrupt:` … `if interrupt.asked: save and leave`. A `quiet` one says nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self.asked: str | None = None
        self._asked_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            if time.monotonic() - self._asked_at > _SAME_S:
                os._exit(128 + number)
            return
        self._asked_at = time.monotonic()
        self.asked = signal.Signals(number).name
        if not self._quiet:
            os.write(2, f"\n{self.asked}: finishing this step and saving; once more to stop at once\n".encode())

"""Ctrl-C, SIGTERM and SIGUSR1: the first asks for an orderly stop after this step, the second ends the process at once.

SIGUSR1 is what HyperPod's agent sends to end a run in order, and many Slurm scripts before the time limit. One request may arrive
twice: Slurm signals every process of a job, and the agent passes on what it gets. What comes within less than half a second of the
first is the first. A scheduler may also repeat its request in other words, SIGUSR1 before the time limit and SIGTERM at it: one after
the other is still an orderly stop, and only the same signal again, or Ctrl-C, is somebody who does not want to wait.

Once the last step is saved there is nothing left to stop: from then on signals are ignored, and the exit code stays the one of an
orderly end.
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
    """`with Interrupt() as interrupt:` … `if interrupt.asked: save and leave`, then `interrupt.settle()`.

    Args:
        quiet: say nothing.
        hold: after `settle`, go on ignoring signals when the block is left, because the process ends with it: what it still has to
            do (closing files, leaving process groups, unloading torch) takes long enough for a second signal.
    """

    def __init__(self, *, quiet: bool = False, hold: bool = False) -> None:
        self._quiet, self._hold = quiet, hold
        self._seen: set[int] = set()
        self._settled = False
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
            # An ending interpreter takes its own handlers back, but not what the system ignores.
            signal.signal(number, signal.SIG_IGN if self._settled and self._hold else handler)

    def settle(self) -> None:
        """The last step is saved: from now on signals change nothing."""
        self._settled = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._settled:
            return
        again = number in self._seen or signal.SIGINT in (number, *self._seen)
        self._seen.add(number)
        if self.asked is not None:
            if again and time.monotonic() - self._asked_at > _SAME_S:
                os._exit(128 + number)
            return
        self._asked_at = time.monotonic()
        self.asked = signal.Signals(number).name
        if not self._quiet:
            os.write(2, f"\n{self.asked}: finishing this step and saving; once more to stop at once\n".encode())

"""The handler of Ctrl-C, SIGTERM and SIGUSR1: the first signal stops the run after this step, the second ends the process at once.

HyperPod's agent sends SIGUSR1 to stop a run gracefully, and many Slurm scripts send it before the time limit. One request may
arrive twice: Slurm signals every process of a job, and the agent forwards what it gets. Signals within 0.4 s of the first count as
the first. A scheduler may also send SIGUSR1 before the time limit and SIGTERM at it: two different signals are still a graceful
stop. Only the same signal again, or Ctrl-C, ends the process at once.

After the last step is saved, signals are ignored, and the exit code stays that of a graceful stop.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_SAME_S = 0.4
# The `interrupt` of the run that this thread trains.
_current = threading.local()


class Interrupt:
    """A context manager that turns signals into a request to stop.

    Usage: `with Interrupt() as interrupt:` … `if interrupt.asked: save and leave`, then `interrupt.settle()`.

    Args:
        quiet: print nothing.
        hold: after `settle`, keep ignoring signals when the block is left, because the process is about to end. Closing files,
            destroying process groups and unloading torch take long enough for a second signal to arrive.
    """

    def __init__(self, *, quiet: bool = False, hold: bool = False) -> None:
        self._quiet, self._hold = quiet, hold
        self._seen: set[int] = set()
        self._settled = False
        self.asked: str | None = None
        self._asked_at = 0.0
        self._previous: dict[int, Any] = {}
        self._outer: Interrupt | None = None

    def __enter__(self) -> Interrupt:
        self._outer, _current.interrupt = getattr(_current, "interrupt", None), self
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _current.interrupt = self._outer
        for number, handler in self._previous.items():
            # An interpreter that ends restores its own handlers, but leaves SIG_IGN in place.
            signal.signal(number, signal.SIG_IGN if self._settled and self._hold else handler)

    def stop(self) -> None:
        """Stop the run after this step, as SIGUSR1 does. No handler is needed, so that any thread may call it."""
        self.asked = self.asked or signal.SIGUSR1.name

    def settle(self) -> None:
        """Ignore signals from now on, because the last step is saved."""
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


def stop_run() -> None:
    """Stop the run that this thread trains after this step. Called outside training it does nothing."""
    interrupt: Interrupt | None = getattr(_current, "interrupt", None)
    if interrupt is not None:
        interrupt.stop()

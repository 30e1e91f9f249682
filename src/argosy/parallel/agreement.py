"""What every rank must know alike to do the same thing at the same step: whether one of them was asked to stop, the time, and
how many saves have been written.

Signals reach ranks at different moments, and clocks differ. At the end of each step a rank sends what it knows, without
waiting, and reads what all of them sent a step ago, which has arrived by then. So all ranks learn of a signal at the same
step, at most one later, and neither the device nor, as long as ranks are within a step of each other, the host waits. It
travels between hosts, not between GPUs. In one process nothing is sent, and a signal is known at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from argosy.parallel.mesh import Mesh


class Asked(Protocol):
    """Who hears of signals in this process."""

    asked: str | None


class Agreement:
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._listener: Asked | None = None
        self._count: Callable[[], int] = lambda: 0
        self._signal, self._time, self._saves = 0, time.monotonic(), 0
        self._sent: tuple[torch.Tensor, Any] | None = None
        if mesh.devices is not None:
            self._send()
            self._receive()

    def listen(self, listener: Asked) -> None:
        self._listener = listener

    def follow(self, count: Callable[[], int]) -> None:
        """`count` says how many saves this rank has seen to their end, well or not."""
        self._count = count

    @property
    def saves(self) -> int:
        """How many the first rank has seen to their end, once all ranks know of it."""
        return self._count() if self._mesh.devices is None else self._saves

    @property
    def asked(self) -> str | None:
        """The signal that asks for a stop, once all ranks know of it."""
        if self._mesh.devices is None:
            return None if self._listener is None else self._listener.asked
        return signal.Signals(self._signal).name if self._signal else None

    def now(self) -> float:
        """Seconds; on all ranks those of the first one's clock."""
        return time.monotonic() if self._mesh.devices is None else self._time

    def after_step(self) -> None:
        """Learn what was sent a step ago, and send again."""
        if self._mesh.devices is not None:
            self._receive()
            self._send()

    def close(self) -> None:
        """Take what is still on its way, so that no rank leaves while another waits for it."""
        self._receive()

    def _send(self) -> None:
        asked = None if self._listener is None else self._listener.asked
        number = 0 if asked is None else signal.Signals[asked].value
        clock, saves = (time.monotonic(), self._count()) if self._mesh.is_first else (0.0, 0)
        known = torch.tensor([number, clock, saves], dtype=torch.float64)
        self._sent = known, dist.all_reduce(known, dist.ReduceOp.MAX, async_op=True)

    def _receive(self) -> None:
        if self._sent is not None:
            known, work = self._sent
            work.wait()
            self._signal, self._time, self._saves = int(known[0]), float(known[1]), int(known[2])
            self._sent = None

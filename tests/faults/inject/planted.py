"""Faults that happen inside a rank, planted around the step it takes."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any


def plant(loop: Any) -> None:
    name, rank, at, *always = os.environ["ARGOSY_FAULT"].split(":")
    again = bool(always) or os.environ.get("ARGOSY_ATTEMPT", "0") == "0"
    if os.environ.get("RANK", "0") != rank or not again:
        return
    take_step = loop.take_step

    def faulty(engine: Any, optimizer: Any, batch: Any, *, step: int, **options: Any) -> Any:
        if step != int(at) and name not in LASTING:
            return take_step(engine, optimizer, batch, step=step, **options)
        if step < int(at):
            return take_step(engine, optimizer, batch, step=step, **options)
        return FAULTS[name](take_step, engine, optimizer, batch, step=step, **options)

    loop.take_step = faulty


def _raise(take_step: Any, *step: Any, **options: Any) -> Any:
    raise RuntimeError("planted: the step failed")


def _segfault(take_step: Any, *step: Any, **options: Any) -> Any:
    ctypes.string_at(0)


def _hold_the_gil(take_step: Any, *step: Any, **options: Any) -> Any:
    ctypes.PyDLL(None).sleep(600)  # unlike CDLL, PyDLL does not let go of the lock


def _sleep(take_step: Any, *step: Any, **options: Any) -> Any:
    time.sleep(600)


def _skip_collective(take_step: Any, *step: Any, **options: Any) -> Any:
    """The gradients of this step are not summed here: the next collective meets another one over there."""
    from argosy.parallel import data

    whole, data.sum_gradients = data.sum_gradients, lambda *arguments: None
    try:
        return take_step(*step, **options)
    finally:
        data.sum_gradients = whole


def _eat_memory(take_step: Any, *step: Any, **options: Any) -> Any:
    held = []
    while True:
        held.append(bytearray(os.urandom(1) * (64 * 2**20)))
        time.sleep(0.2)


FAULTS = {
    "raise": _raise, "segfault": _segfault, "gil": _hold_the_gil, "sleep": _sleep, "skip-collective": _skip_collective,
    "eat-memory": _eat_memory,
}  # fmt: skip
LASTING = {"slow"}  # from their step on

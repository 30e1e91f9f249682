"""Faults inside a rank, planted around its training step."""

from __future__ import annotations

import ctypes
import os
import re
import time
from typing import Any


def plant(loop: Any) -> None:
    if "ARGOSY_TIMEOUT_S" in os.environ:
        from datetime import timedelta

        from argosy.parallel import mesh

        mesh.TIMEOUT = timedelta(seconds=float(os.environ["ARGOSY_TIMEOUT_S"]))
    name, rank, at, *always = os.environ["ARGOSY_FAULT"].split(":")
    if name == "slow":
        _slow_down(loop, float(at) if os.environ.get("RANK") == rank else 1.0)
        return
    again = bool(always) or os.environ.get("ARGOSY_ATTEMPT", "0") == "0"
    if os.environ.get("RANK", "0") != rank or not again:
        return
    take_step, planted = loop.take_step, []

    def faulty(engine: Any, optimizer: Any, batch: Any, *, step: int, **options: Any) -> Any:
        if step != int(at) or (planted and not always):
            return take_step(engine, optimizer, batch, step=step, **options)
        planted.append(step)
        return FAULTS[name](take_step, engine, optimizer, batch, step=step, **options)

    loop.take_step = faulty


def _slow_down(loop: Any, factor: float) -> None:
    """Make every micro-batch take 0.1 s, and one rank's `factor` times as long."""
    take_step, slowed = loop.take_step, []

    def slower(engine: Any, *step: Any, **options: Any) -> Any:
        if not slowed:
            slowed.append(engine.model.register_forward_pre_hook(lambda *_: time.sleep(0.1 * factor)))
        return take_step(engine, *step, **options)

    loop.take_step = slower


def _raise(take_step: Any, *step: Any, **options: Any) -> Any:
    raise RuntimeError("planted: the step failed")


def _segfault(take_step: Any, *step: Any, **options: Any) -> Any:
    ctypes.string_at(0)


def _hold_the_gil(take_step: Any, *step: Any, **options: Any) -> Any:
    # One native call that never ends.
    re.match(r"(a+)+$", "a" * 64 + "b")


def _sleep(take_step: Any, *step: Any, **options: Any) -> Any:
    time.sleep(600)


def _hold(take_step: Any, *step: Any, **options: Any) -> Any:
    while not os.path.exists(os.environ["ARGOSY_HOLD"]):
        time.sleep(0.01)
    return take_step(*step, **options)


def _skip_collective(take_step: Any, *step: Any, **options: Any) -> Any:
    """Do not sum this rank's gradients of this step: its next collective meets another one of the other ranks."""
    from argosy.parallel import replicas

    whole, replicas.start_sum = replicas.start_sum, lambda *arguments: _Skipped()
    try:
        return take_step(*step, **options)
    finally:
        replicas.start_sum = whole


class _Skipped:
    """The handle of a collective that was never launched."""

    def wait(self) -> None:
        pass


def _hurt_gradients(take_step: Any, *step: Any, factor: float, **options: Any) -> Any:
    """Multiply this rank's gradients of this step, before they are summed over all ranks."""
    from argosy.parallel import replicas

    whole = replicas.start_sum
    replicas.start_sum = lambda flat, group: whole(flat.mul_(factor), group)
    try:
        return take_step(*step, **options)
    finally:
        replicas.start_sum = whole


def _nan(*step: Any, **options: Any) -> Any:
    return _hurt_gradients(*step, factor=float("nan"), **options)


def _spike(*step: Any, **options: Any) -> Any:
    return _hurt_gradients(*step, factor=1e4, **options)


def _flip_a_bit(take_step: Any, engine: Any, *step: Any, **options: Any) -> Any:
    import torch

    done = take_step(engine, *step, **options)
    next(engine.model.parameters()).data.view(torch.int32).view(-1)[5] ^= 1 << 20
    return done


def _eat_memory(take_step: Any, *step: Any, **options: Any) -> Any:
    held = []
    while True:
        held.append(bytearray(os.urandom(1) * (64 * 2**20)))
        time.sleep(0.2)


def _out_of_memory(take_step: Any, engine: Any, *step: Any, **options: Any) -> Any:
    """Ask the device for 16 TiB, as a batch that is too large does."""
    import torch

    return torch.empty(2**44, dtype=torch.uint8, device=next(engine.model.parameters()).device)


FAULTS = {
    "raise": _raise, "segfault": _segfault, "gil": _hold_the_gil, "sleep": _sleep, "hold": _hold, "skip-collective": _skip_collective,
    "eat-memory": _eat_memory, "out-of-memory": _out_of_memory, "nan": _nan, "spike": _spike, "flip": _flip_a_bit,
}  # fmt: skip

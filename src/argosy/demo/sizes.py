"""The choice of a model and a number of steps that fit this machine and the given time.

The largest model that gets enough steps to learn is taken. Speed is measured on a few steps of the real run, so nothing has
to be known about the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ENOUGH_STEPS = 400
MOST_STEPS = 1500
# Whole sentences need fewer steps than this, whole stories more.
FEWEST_STEPS = 100


@dataclass(frozen=True)
class Size:
    """The model, batch size and learning rate of a demo."""

    layers: int
    hidden: int
    heads: int
    global_batch: int
    lr: float


# From smallest to largest.
SIZES = (
    Size(layers=2, hidden=64, heads=2, global_batch=2, lr=8e-3),
    Size(layers=2, hidden=96, heads=4, global_batch=4, lr=6e-3),
    Size(layers=3, hidden=128, heads=4, global_batch=8, lr=4e-3),
    Size(layers=4, hidden=256, heads=4, global_batch=8, lr=2e-3),
)


def choose_size(seconds: float, seconds_per_step: Callable[[Size], float]) -> tuple[Size, float]:
    """Return the size for `seconds` of training, and its seconds a step.

    Sizes are measured from the smallest up until one gets too few steps: on a slow machine, measuring more would use up the
    time.
    """
    chosen, step_s = SIZES[0], seconds_per_step(SIZES[0])
    for size in SIZES[1:]:
        if seconds / step_s < 2 * ENOUGH_STEPS:
            break
        larger_s = seconds_per_step(size)
        if seconds / larger_s < ENOUGH_STEPS:
            break
        chosen, step_s = size, larger_s
    return chosen, step_s


def steps_within(seconds: float, step_s: float, fewest: int = FEWEST_STEPS) -> int:
    """Return the number of steps that fit, in tens, between `fewest` and MOST_STEPS."""
    return max(fewest, min(MOST_STEPS, int(seconds / step_s) // 10 * 10))

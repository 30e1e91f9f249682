"""A model and a number of steps that fit this machine and the time there is.

The largest model is taken that gets enough steps to learn from. Speed is measured on a few steps of the real run, so
that nothing has to be known of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ENOUGH_STEPS = 400
MOST_STEPS = 1500
FEWEST_STEPS = 100  # whole sentences come with fewer, stories do not


@dataclass(frozen=True)
class Size:
    """The model and the batch of a demo, with a learning rate that suits them."""

    layers: int
    hidden: int
    heads: int
    global_batch: int
    lr: float


# From the smallest to the largest.
SIZES = (
    Size(layers=2, hidden=64, heads=2, global_batch=2, lr=8e-3),
    Size(layers=2, hidden=96, heads=4, global_batch=4, lr=6e-3),
    Size(layers=3, hidden=128, heads=4, global_batch=8, lr=4e-3),
    Size(layers=4, hidden=256, heads=4, global_batch=8, lr=2e-3),
)


def choose_size(seconds: float, seconds_per_step: Callable[[Size], float]) -> tuple[Size, float]:
    """The (size, seconds a step) for `seconds` of training. Sizes are measured from the smallest up, until one gets too few
    steps: on a slow machine, measuring more would take the time there is."""
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
    """Whole tens of steps that fit, within what is worth doing."""
    return max(fewest, min(MOST_STEPS, int(seconds / step_s) // 10 * 10))

"""The learning rate as a pure function of the step: nothing to save, nothing to restore.

Every schedule rises to the peak over the warm-up. Then `constant` stays, `cosine` and `linear` fall to the final rate over
the rest of the run, `inverse_sqrt` falls with the square root of the progress and stops at the final rate, and `wsd` stays
and falls over the last `decay` steps. Progress is counted in samples: while the batch still grows, a small step moves the
schedule less than a large one; where it does not grow, the two are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from argosy.config.batches import Batches
from argosy.config.schema import OptimSpec

_ALIKE = Batches(1)  # every step counts the same


@dataclass(frozen=True)
class Schedule:
    kind: str
    peak: float
    final: float
    warmup: int  # steps
    steps: int
    decay: int = 0  # steps, of wsd
    decay_shape: str = "linear"  # of wsd
    batches: Batches = _ALIKE

    def lr(self, step: int) -> float:
        """For the optimiser step after `step` steps. The last step of the warm-up has the peak, and the last step of the
        run the final rate, where the schedule falls to it."""
        at = self.batches.samples
        if step < self.warmup:
            return self.peak * (at(step + 1) / at(self.warmup))
        if self.kind == "constant":
            return self.peak
        if self.kind == "inverse_sqrt":
            start = max(1, self.warmup)
            return max(self.final, self.peak * math.sqrt(at(start) / at(max(start, step))))
        shape = self.decay_shape if self.kind == "wsd" else self.kind
        start = max(0, self.steps - 1 - self.decay) if self.kind == "wsd" else self.warmup
        done = (at(max(start, step)) - at(start)) / max(1, at(max(0, self.steps - 1)) - at(start))
        return self.final + (self.peak - self.final) * _left(shape, min(1.0, done))


def _left(shape: str, done: float) -> float:
    """From 1 to 0 as `done` goes from 0 to 1."""
    if shape == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1 - (math.sqrt(done) if shape == "sqrt" else done)


def make_schedule(optim: OptimSpec, batches: Batches, *, steps: int, warmup: int, decay: int) -> Schedule:
    return Schedule(
        optim.schedule, optim.lr, optim.min_lr, warmup, steps, decay, optim.decay_shape or "linear", batches
    )

"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass

from argosy.config.schema import OptimSpec


@dataclass(frozen=True)
class Schedule:
    kind: str
    peak: float
    final: float
    warmup: int  # steps
    steps: int

    def lr(self, step: int) -> float:
        """For the optimiser step after `step` steps: rises to the peak over `warmup` steps, then falls to `final`,
        which the last step reaches."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        decay = max(1, self.steps - 1 - self.warmup)
        done = min(1.0, (step - self.warmup) / decay)
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final + (self.peak - self.final) * left


def make_schedule(optim: OptimSpec, steps: int, warmup: int) -> Schedule:
    return Schedule(optim.schedule, optim.lr, optim.min_lr, warmup, steps)

"""The learning rate as a pure function of the step: nothing to save, nothing to restore.

Every schedule rises to the peak over the warm-up. Then `constant` stays, `cosine` and `linear` fall to the final rate,
`inverse_sqrt` falls with the square root of the progress and stops at the final rate, and `wsd` stays and falls over its
`decay`. Progress is counted in samples: while the batch still grows, a small step moves the schedule less than a large one;
where it does not grow, the two are the same.

By default the first step has lr / warm-up steps, the last step of the warm-up and the one after it have the peak, and the last
step of the run has the final rate: no step is spent at a rate of 0, and both ends are reached exactly. `optim.warmup_init` and
`optim.decay_end` give the schedules of Megatron-LM, Composer and nanoGPT, whose phases are counted from the step's beginning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from argosy.config.batches import Batches
from argosy.config.lr_phases import LrPhases, lr_phases
from argosy.config.schema import RunSpec


@dataclass(frozen=True)
class Schedule:
    kind: str
    shape: str  # of the fall: linear, cosine, sqrt or exponential
    peak: float
    final: float
    first: float | None  # rate of the first step; None: what one step of the warm-up gives
    phases: LrPhases
    batches: Batches
    steps: int  # length of the run

    def lr(self, step: int) -> float:
        """The learning rate of the optimiser step after `step` steps."""
        done, phases = self.batches.samples(step), self.phases
        if done < phases.rise_end:
            if self.first is None:
                return self.peak * (self.batches.samples(step + 1) / phases.rise_end)
            return self.first + (self.peak - self.first) * (done / phases.rise_end)
        if self.kind == "constant":
            return self.peak
        if done > phases.fall_end:
            return self.final
        start = phases.fall_start
        if self.kind == "inverse_sqrt":
            return max(self.final, self.peak * math.sqrt(start / max(start, done)))
        share = (max(start, done) - start) / ((phases.fall_end - start) or 1)
        return self.final + (self.peak - self.final) * _left(self.shape, share)


def _left(shape: str, share: float) -> float:
    """What is left of the way from the peak to the final rate: from 1 to 0 as `share` goes from 0 to 1."""
    if shape == "cosine":
        return (1 + math.cos(math.pi * share)) / 2
    if shape == "exponential":
        return 2 * math.pow(0.5, share) - 1
    return 1 - (math.sqrt(share) if shape == "sqrt" else share)


def make_schedule(spec: RunSpec, *, steps: int, epoch_samples: int) -> Schedule:
    optim, phases = spec.optim, lr_phases(spec, steps=steps, epoch_samples=epoch_samples)
    if phases is None:
        raise AssertionError("checked when the spec was resolved: no phase is a time")
    shape = optim.decay_shape or "linear" if optim.schedule == "wsd" else optim.schedule
    return Schedule(optim.schedule, shape, optim.lr, optim.min_lr, optim.warmup_init, phases, spec.train.batches, steps)

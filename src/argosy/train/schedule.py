"""The learning-rate schedule, a pure function of the step: nothing to save, nothing to restore.

Every schedule rises to the peak over the warm-up. Then `constant` stays, `cosine` and `linear` decay to the final rate,
`inverse_sqrt` decays with the square root of the progress and stops at the final rate, and `wsd` stays and decays over its
`decay`. Progress is counted in samples: during a batch ramp-up a small step moves the schedule less than a large one. With a
constant batch, counting steps gives the same.

By default the first step has lr / warm-up steps, the last step of the warm-up and the one after it have the peak, and the last
step of the run has the final rate: no step has a rate of 0, and both ends are reached exactly. `optim.warmup_init` and
`optim.decay_end` give the schedules of Megatron-LM, Composer and nanoGPT, whose phases are counted from the step's beginning.

The rate depends on the step and on the length of the run. A longer run is less far along its decay: if a cosine run is lengthened
at its end, its rate jumps back up. `schedule_notes` tells the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from argosy.config.batches import Batches
from argosy.config.lr_schedules import SHAPES, STABLE, LrPhases, LrSchedule, lr_phases
from argosy.config.schema import OptimSpec, RunSpec
from argosy.config.units import LENGTH_KEYS

_KEYS = ("optim.", *LENGTH_KEYS, "train.batch_rampup")
# The relative difference up to which two rates count as the same.
_SAME = 1e-9


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: the rate of any step."""

    kind: LrSchedule
    # The remaining fraction of the decay, by the share that is done. None: the rate does not decay to an end.
    left: Callable[[float], float] | None
    peak: float
    final: float
    # The rate of the first step. None: that of one step of the warm-up.
    first: float | None
    phases: LrPhases
    batches: Batches
    # The length of the run.
    steps: int

    def lr(self, step: int) -> float:
        """Return the learning rate of the optimiser step after `step` steps."""
        done, phases = self.batches.samples(step), self.phases
        if done < phases.rise_end:
            if self.first is None:
                return self.peak * (self.batches.samples(step + 1) / phases.rise_end)
            return self.first + (self.peak - self.first) * (done / phases.rise_end)
        if not self.kind.falls:
            return self.peak
        if done > phases.fall_end:
            return self.final
        start = phases.fall_start
        if self.left is None:
            return max(self.final, self.peak * math.sqrt(start / max(start, done)))
        share = (max(start, done) - start) / ((phases.fall_end - start) or 1)
        return self.final + (self.peak - self.final) * self.left(share)


def make_schedule(spec: RunSpec, *, steps: int, epoch_samples: int) -> Schedule:
    optim, phases = spec.optim, lr_phases(spec, steps=steps, epoch_samples=epoch_samples)
    if phases is None:
        raise AssertionError("checked when the spec was resolved: no phase is a time")
    kind = optim.lr_schedule
    shape = optim.decay_shape or kind.shape
    left = None if shape is None else SHAPES[shape]
    return Schedule(kind, left, optim.lr, optim.min_lr, optim.warmup_init, phases, spec.train.batches, steps)


def schedule_notes(before: Schedule, after: Schedule, optim: OptimSpec, step: int, changes: Iterable[str]) -> list[str]:
    """Return messages for a run that resumes after `step` steps with a changed schedule; none if no rate differs."""
    was, now = before.lr(step), after.lr(step)
    end_was, end_now = before.lr(before.steps - 1), after.lr(after.steps - 1)
    if _alike(was, now):
        if before.steps == after.steps and _alike(end_was, end_now):
            return []
        return [
            f"the learning rate of step {step + 1} is {now:.3g}, as it was planned; the last step, {after.steps}, has {end_now:.3g} "
            f"(before: step {before.steps}, {end_was:.3g})"
        ]
    why = "; ".join(change for change in changes if change.startswith(_KEYS))
    text = f"warning: the learning rate {'rises' if now > was else 'falls'} from {was:.3g} to {now:.3g} at step {step + 1} ({why})"
    if before.steps == after.steps or after.left is None:
        return [text]
    return [
        f"{text}: {optim.schedule} falls over the whole length, which was {before.steps} steps and is {after.steps}. {_advice(optim, was)}"
    ]


def _advice(optim: OptimSpec, was: float) -> str:
    constant = f"optim.schedule=constant optim.lr={was:.3g} goes on at the rate it had"
    if optim.lr_schedule.is_stable:
        return f"A checkpoint from before the fall goes on without a jump; or {constant}"
    return (
        f"{constant}; name=… init_from=… with optim.warmup begins a new run from these weights; a run whose length is not settled is "
        f"better begun with optim.schedule={STABLE} optim.decay=…, which can be lengthened before its fall without a jump"
    )


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * max(abs(one), abs(other))

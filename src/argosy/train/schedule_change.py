"""What a changed spec does to the learning rate of a run that goes on, in words.

The rate is a function of the step and of the whole schedule, so that a longer run is less far along its fall: lengthened at its end, a
cosine run jumps back up. That is a choice, not an accident, only where it is said.
"""

from __future__ import annotations

from collections.abc import Iterable

from argosy.config.schema import OptimSpec
from argosy.train.schedule import Schedule

_FALLING = ("cosine", "linear", "wsd")
_KEYS = ("optim.", "train.steps", "train.tokens", "train.samples", "train.epochs", "train.batch_rampup")
_SAME = 1e-9  # relative: the same rate, rounded otherwise


def schedule_notes(before: Schedule, after: Schedule, optim: OptimSpec, step: int, changes: Iterable[str]) -> list[str]:
    """Notes for a run that goes on after `step` steps with another schedule than made them; none where no rate differs."""
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
    if before.steps == after.steps or optim.schedule not in _FALLING:
        return [text]
    return [
        f"{text}: {optim.schedule} falls over the whole length, which was {before.steps} steps and is {after.steps}. {_advice(optim, was)}"
    ]


def _advice(optim: OptimSpec, was: float) -> str:
    constant = f"optim.schedule=constant optim.lr={was:.3g} goes on at the rate it had"
    if optim.schedule == "wsd":
        return f"A checkpoint from before the fall goes on without a jump; or {constant}"
    return (
        f"{constant}; name=… init_from=… with optim.warmup begins a new run from these weights; a run whose length is not settled is "
        "better begun with optim.schedule=wsd optim.decay=…, which can be lengthened before its fall without a jump"
    )


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * max(abs(one), abs(other))

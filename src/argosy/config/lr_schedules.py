"""Learning-rate schedules: the registry of schedules and of the shapes of a decay, and the boundaries of a run's own phases.

The schema takes the values of `optim.schedule` and `optim.decay_shape` from here. Every schedule rises to the peak over the warmup; its
entry says how it goes on, so that no other code compares the names of schedules. A schedule with another decay is a line in each table.

Boundaries of warmup and decay are samples instead of steps for two reasons: with a batch ramp the schedule advances by samples
consumed, and a phase given in samples or tokens can end inside a step, as in Megatron. Phases that follow from the run's own length are
whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from argosy.config.origins import Origins
from argosy.config.units import Duration
from argosy.errors import ArgosyError

if TYPE_CHECKING:
    from argosy.config.schema import RunSpec

# The remaining fraction of a decay from the peak to the final rate: from 1 to 0 as the share that is done goes from 0 to 1.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "sqrt": lambda done: 1 - math.sqrt(done),
    "exponential": lambda done: 2 * math.pow(0.5, done) - 1,
}


@dataclass(frozen=True)
class LrSchedule:
    """The course of the learning rate after the warmup."""

    # The shape of the decay to the final rate. None: the rate does not decay by the length of the run.
    shape: str | None = None
    # The rate stays at the peak until the last `optim.decay`, and `optim.decay_shape` may choose another shape.
    is_stable: bool = False
    # The rate falls with the square root of the progress, until it reaches the final one.
    by_root: bool = False
    # What other trainers call it, by trainer.
    names_elsewhere: Mapping[str, str] = field(default_factory=dict)

    @property
    def falls(self) -> bool:
        return self.by_root or self.shape is not None


LR_SCHEDULES: dict[str, LrSchedule] = {
    "cosine": LrSchedule("cosine", names_elsewhere={"megatron": "cosine", "foundry": "cosine_with_warmup"}),
    "linear": LrSchedule("linear", names_elsewhere={"megatron": "linear", "foundry": "linear_decay_with_warmup"}),
    "constant": LrSchedule(names_elsewhere={"megatron": "constant", "foundry": "constant_with_warmup"}),
    "inverse_sqrt": LrSchedule(
        by_root=True, names_elsewhere={"megatron": "inverse-square-root", "foundry": "inv_sqrt_with_warmup"}
    ),
    "wsd": LrSchedule("linear", is_stable=True, names_elsewhere={"megatron": "WSD"}),
}
# The schedules that `optim.decay` and `optim.decay_shape` belong to.
STABLE = " or ".join(name for name, schedule in LR_SCHEDULES.items() if schedule.is_stable)


def schedule_elsewhere(trainer: str, name: str) -> str | None:
    """Return the name of the schedule that another trainer calls `name`, or None."""
    return next((own for own, schedule in LR_SCHEDULES.items() if schedule.names_elsewhere.get(trainer) == name), None)


@dataclass(frozen=True)
class LrPhases:
    """The boundaries of the schedule, in samples consumed before a step.

    Warmup ends at `rise_end`. The decay starts at `fall_start` and reaches the final learning rate at `fall_end`, which is
    infinite for a decay without an end.
    """

    rise_end: float
    fall_start: float
    fall_end: float


def lr_phases(spec: RunSpec, *, steps: int, epoch_samples: int | None = None) -> LrPhases | None:
    """Return the phases of a run of `steps` steps, or None if a phase is given in epochs and `epoch_samples` is None."""
    optim, batches = spec.optim, spec.train.batches
    seq_len = spec.data.seq_len
    warmup = optim.warmup.steps(batches, seq_len=seq_len, epoch_samples=epoch_samples)
    decay = Duration(0.0, "steps") if optim.decay is None else optim.decay
    fall = decay.steps(batches, seq_len=seq_len, epoch_samples=epoch_samples, until=steps)
    exact_warmup, exact_fall = (
        optim.warmup.exact_samples(batches, seq_len=seq_len, epoch_samples=epoch_samples),
        decay.exact_samples(batches, seq_len=seq_len, epoch_samples=epoch_samples),
    )
    end = (
        None
        if optim.decay_end is None
        else optim.decay_end.exact_samples(batches, seq_len=seq_len, epoch_samples=epoch_samples)
    )
    if warmup is None or fall is None or exact_warmup is None or exact_fall is None:
        return None
    if end is None and optim.decay_end is not None:
        return None
    rise_end: float = batches.samples(warmup) if optim.warmup_init is None else exact_warmup
    last = max(0, steps - 1)
    fall_end: float = batches.samples(last) if end is None else end
    if optim.lr_schedule.is_stable:
        if end is None:
            return LrPhases(rise_end, batches.samples(max(0, last - fall)), fall_end)
        if decay.unit == "steps":
            # The decay is the last steps of the schedule. With a batch ramp they have more samples than the first steps.
            end_step = batches.steps(math.ceil(end))
            exact_fall = batches.samples(end_step) - batches.samples(max(0, end_step - fall))
        return LrPhases(rise_end, max(0, end - exact_fall), fall_end)
    if optim.lr_schedule.by_root:
        first: float = batches.samples(1) if optim.warmup_init is None else 1
        return LrPhases(rise_end, max(rise_end, first), math.inf if end is None else end)
    return LrPhases(rise_end, rise_end, fall_end)


def check_schedule(spec: RunSpec, origins: Origins) -> None:
    """Check the schedule as far as the spec alone allows, before the data is opened."""
    optim = spec.optim
    for key, rate, fix in (
        ("optim.min_lr", optim.min_lr, optim.lr / 10),
        ("optim.warmup_init", optim.warmup_init or 0.0, 0.0),
    ):
        if rate > optim.lr:
            which = "final" if key == "optim.min_lr" else "first"
            raise ArgosyError(
                "config.arithmetic",
                f"the {which} learning rate {rate:g} is above the peak {optim.lr:g}",
                key=key,
                value=rate,
                origin=origins.get(key),
                fix=f"{key}={fix:g}",
            )
    for name, duration in (("warmup", optim.warmup), ("decay", optim.decay), ("decay_end", optim.decay_end)):
        if duration is not None and duration.unit == "seconds":
            raise ArgosyError(
                "config.bad-value",
                f"the learning rate is a function of the step, so {name} cannot be a wall-clock time",
                key=f"optim.{name}",
                value=str(duration),
                origin=origins.get(f"optim.{name}"),
                fix="give it in steps (200ba) or tokens (300M)",
            )
    _check_kind(spec, origins)
    steps = spec.train.length.steps(spec.train.batches, seq_len=spec.data.seq_len)
    if steps is not None:
        check_phases(spec, steps=steps, origins=origins)


def _check_kind(spec: RunSpec, origins: Origins) -> None:
    """Refuse keys that the schedule does not read."""
    optim = spec.optim
    is_stable, belongs = optim.lr_schedule.is_stable, f"belongs to the {STABLE} schedule"
    if is_stable and optim.decay is None:
        raise ArgosyError(
            "config.missing-key",
            f"a {optim.schedule} (warmup-stable-decay) schedule needs the length of its decay, and none is given",
            key="optim.decay",
            fix="a tenth to a fifth of the run is common: optim.decay=2000 (steps) or 10B (tokens)",
        )
    for key, value, used, why, fix in (
        ("optim.decay", optim.decay, is_stable, belongs, f"optim.schedule={STABLE}, or "),
        ("optim.decay_shape", optim.decay_shape, is_stable, belongs, f"optim.schedule={STABLE}, or "),
        ("optim.decay_end", optim.decay_end, optim.lr_schedule.falls, "is where the decay ends", ""),
        ("optim.warmup_init", optim.warmup_init, optim.warmup.amount > 0, "is where the warmup starts", "give optim.warmup, or "),
    ):  # fmt: skip
        if value is not None and not used:
            has = "has no warmup" if key == "optim.warmup_init" else f"is {optim.schedule}"
            raise ArgosyError(
                "config.conflict",
                f"{key} {why}, and this schedule {has}",
                key=key,
                value=str(value),
                origin=origins.get(key),
                fix=f"{fix}leave the key out",
            )


def counts_epochs(spec: RunSpec) -> bool:
    """True if the length of the run or of a phase is counted in epochs, and so known only once the data is open."""
    optim = spec.optim
    durations = (spec.train.length, optim.warmup, optim.decay, optim.decay_end)
    return any(duration is not None and duration.unit == "epochs" for duration in durations)


def check_phases(
    spec: RunSpec, *, steps: int, epoch_samples: int | None = None, origins: Origins | None = None
) -> None:
    """Raise if warmup and decay do not fit into the schedule, which ends with the run or at `optim.decay_end`.

    Called again once the data is open where `counts_epochs`: lengths in epochs are known only then.
    """
    optim, batches = spec.optim, spec.train.batches
    seq_len = spec.data.seq_len
    whole, end = f"run of {steps}", steps
    if optim.decay_end is not None:
        end = optim.decay_end.steps(batches, seq_len=seq_len, epoch_samples=epoch_samples) or 0
        whole = f"schedule of optim.decay_end = {optim.decay_end}, which is {end}"
        if not end:
            return
    warmup = optim.warmup.steps(batches, seq_len=seq_len, epoch_samples=epoch_samples) or 0
    decay = (
        0
        if optim.decay is None
        else optim.decay.steps(batches, seq_len=seq_len, epoch_samples=epoch_samples, until=end) or 0
    )
    if warmup and warmup >= end:
        raise ArgosyError(
            "config.arithmetic",
            f"the warmup of {warmup} steps is not shorter than the {whole} steps",
            key="optim.warmup",
            value=str(optim.warmup),
            origin=(origins or {}).get("optim.warmup"),
            fix=f"optim.warmup={max(0, end // 10)}",
        )
    if warmup + decay > end:
        raise ArgosyError(
            "config.arithmetic",
            f"warmup and decay do not fit: {warmup} + {decay} = {warmup + decay} steps is more than the {whole} steps",
            key="optim.decay",
            value=str(optim.decay),
            origin=(origins or {}).get("optim.decay"),
            fix=f"optim.decay={end - warmup} or less",
        )

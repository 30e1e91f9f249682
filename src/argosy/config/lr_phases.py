"""Where the phases of the learning-rate schedule begin and end, in samples, and the checks that they fit together.

Samples rather than steps, so that a batch that grows moves the schedule by what was consumed, and so that a phase given in
samples or tokens can end inside a step, as Megatron's do. Phases that follow from the run's own length are whole steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from argosy.config.schema import RunSpec
from argosy.config.units import Duration
from argosy.errors import ArgosyError

Origins = dict[str, str]


@dataclass(frozen=True)
class LrPhases:
    """All in samples consumed before a step."""

    rise_end: float  # the warm-up is over
    fall_start: float
    fall_end: float  # the final rate is reached; infinite where nothing ends the fall


def lr_phases(spec: RunSpec, *, steps: int, epoch_samples: int | None = None) -> LrPhases | None:
    """The phases of a run of `steps` steps, or None where one is given in epochs of an unknown size."""
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
    if optim.schedule == "wsd":
        if end is None:
            return LrPhases(rise_end, batches.samples(max(0, last - fall)), fall_end)
        if decay.unit == "steps":
            # The last steps of the schedule, which take more samples each than the first ones where the batch grows.
            end_step = batches.steps(math.ceil(end))
            exact_fall = batches.samples(end_step) - batches.samples(max(0, end_step - fall))
        return LrPhases(rise_end, max(0, end - exact_fall), fall_end)
    if optim.schedule == "inverse_sqrt":
        first: float = batches.samples(1) if optim.warmup_init is None else 1
        return LrPhases(rise_end, max(rise_end, first), math.inf if end is None else end)
    return LrPhases(rise_end, rise_end, fall_end)


def check_schedule(spec: RunSpec, origins: Origins) -> None:
    """What can be checked before the data is open."""
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
                f"the learning rate is a function of the step, so {name} cannot be a time",
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
    if optim.schedule == "wsd" and optim.decay is None:
        raise ArgosyError(
            "config.missing-key",
            "a wsd schedule stays at the peak until its decay begins, and no decay is given",
            key="optim.decay",
            fix="a tenth to a fifth of the run is common: optim.decay=2000 (steps) or 10B (tokens)",
        )
    falls = optim.schedule != "constant"
    for key, value, used, why, fix in (
        ("optim.decay", optim.decay, optim.schedule == "wsd", "belongs to the wsd schedule", "optim.schedule=wsd, or "),
        ("optim.decay_shape", optim.decay_shape, optim.schedule == "wsd", "belongs to the wsd schedule", "optim.schedule=wsd, or "),
        ("optim.decay_end", optim.decay_end, falls, "says where the fall ends", ""),
        ("optim.warmup_init", optim.warmup_init, optim.warmup.amount > 0, "is where the warm-up starts", "give optim.warmup, or "),
    ):  # fmt: skip
        if value is not None and not used:
            has = "has no warm-up" if key == "optim.warmup_init" else f"is {optim.schedule}"
            raise ArgosyError(
                "config.conflict",
                f"{key} {why}, and this one {has}",
                key=key,
                value=str(value),
                origin=origins.get(key),
                fix=f"{fix}leave the key out",
            )


def check_phases(
    spec: RunSpec, *, steps: int, epoch_samples: int | None = None, origins: Origins | None = None
) -> None:
    """Refuse phases that do not fit into the schedule: the run, or what `optim.decay_end` makes of it. Called again once
    the data is open, for lengths in epochs."""
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
            f"the warm-up of {warmup} steps is not shorter than the {whole} steps",
            key="optim.warmup",
            value=str(optim.warmup),
            origin=(origins or {}).get("optim.warmup"),
            fix=f"optim.warmup={max(0, end // 10)}",
        )
    if warmup + decay > end:
        raise ArgosyError(
            "config.arithmetic",
            f"warm-up and decay do not fit: {warmup} + {decay} = {warmup + decay} steps, and the {whole} steps",
            key="optim.decay",
            value=str(optim.decay),
            origin=(origins or {}).get("optim.decay"),
            fix=f"optim.decay={end - warmup} or less",
        )

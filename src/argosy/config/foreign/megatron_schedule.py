"""Megatron's run length, learning-rate schedule and weight decay as keys of a run spec.

Megatron's OptimizerParamScheduler counts samples consumed before a step. The learning rate starts at --lr-warmup-init, reaches the
peak after the warmup, and reaches --min-lr after --lr-decay-iters (or -samples; default: the length of the run). The last step of
a run is therefore one step before --min-lr. `optim.warmup_init` and `optim.decay_end` express the same in a run spec.
"""

from __future__ import annotations

from argosy.config.batches import Batches
from argosy.config.foreign.draft import Draft
from argosy.config.foreign.megatron_words import Arguments, first_word, number, read_value
from argosy.config.lr_schedules import LR_SCHEDULES, schedule_elsewhere

SCHEDULE_ARGUMENTS = (
    "train-iters", "train-samples", "rampup-batch-size", "lr", "min-lr", "lr-decay-style", "lr-decay-iters", "lr-decay-samples", "lr-warmup-iters",
    "lr-warmup-samples", "lr-warmup-fraction", "lr-warmup-init", "lr-wsd-decay-style", "lr-wsd-decay-iters", "lr-wsd-decay-samples",
    "weight-decay", "start-weight-decay", "end-weight-decay", "weight-decay-incr-style",
)  # fmt: skip
_WSD_SHAPES = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt", "exponential": "exponential"}
_SUFFIX = {"iters": "ba", "samples": "sp"}


def describe_schedule(draft: Draft, given: Arguments) -> None:
    """Translate the arguments of SCHEDULE_ARGUMENTS. The draft must have `train.global_batch` already, if it is given."""
    unit, other = ("samples", "iters") if "train-samples" in given else ("iters", "samples")
    for name in (f"lr-decay-{other}", f"lr-warmup-{other}", f"lr-wsd-decay-{other}", f"train-{other}"):
        if name in given and read_value(name, given[name], int):
            draft.left.append(f"--{name} {first_word(given, name)}: Megatron does not read it with --train-{unit}")
    if "lr" in given:
        draft.set("optim.lr", read_value("lr", given["lr"], number))
    draft.set("optim.min_lr", read_value("min-lr", given.get("min-lr") or ["0.0"], number))
    batches = _batches(draft, given)
    _length(draft, given, batches)
    _weight_decay(draft, given)
    style = first_word(given, "lr-decay-style", "linear")
    known = schedule_elsewhere("megatron", style)
    kind = known or "cosine"
    draft.set("optim.schedule", kind)
    if known is None:
        draft.left.append(f"--lr-decay-style {style}: replaced by cosine")
    length = given.get(f"lr-decay-{unit}") or given.get(f"train-{unit}")
    end = None if length is None else read_value(f"lr-decay-{unit}", length, int)
    if LR_SCHEDULES[kind].falls and end is not None:
        draft.set("optim.decay_end", f"{end}{_SUFFIX[unit]}")
    elif f"lr-decay-{unit}" in given:
        draft.notes.append(f"--lr-decay-{unit}: a constant learning rate has no end")
    _warmup(draft, given, unit, end)
    _wsd(draft, given, unit)


def _batches(draft: Draft, given: Arguments) -> Batches | None:
    """Return the batch size schedule, or None if the global batch is unknown or the ramp-up is invalid."""
    batch = draft.get("train.global_batch")
    if "rampup-batch-size" not in given:
        return None if not batch else Batches(batch)
    words = [*given["rampup-batch-size"], "", "", ""][:3]
    start, increment, samples = (read_value("rampup-batch-size", [word], int) for word in words)
    draft.set("train.batch_rampup", {"start": start, "increment": increment, "samples": samples})
    if batch is None or min(increment, samples) < 1 or batch <= start or (batch - start) % increment:
        return None
    if "train-iters" in given:
        draft.left.append(
            "--rampup-batch-size with --train-iters: Megatron refuses the combination; here the batch ramps up"
        )
    batches, share = Batches(batch, (start, increment, samples)), samples / ((batch - start) // increment)
    for consumed, size in batches.stages:
        # Megatron divides in floating point, which can round below the whole number at which the batch should grow.
        if consumed <= samples and start + int(consumed / share) * increment != size:
            draft.left.append(
                f"--rampup-batch-size {start} {increment} {samples}: after {consumed} samples a step has {size} samples here; "
                f"Megatron's {consumed} / {share} rounds below a whole number, and its batch grows a step later"
            )
            break
    return batches


def _length(draft: Draft, given: Arguments, batches: Batches | None) -> None:
    """Translate the length of the run. Megatron drops an incomplete last batch; Argosy rounds the length up to whole batches."""
    if "train-samples" not in given:
        if "train-iters" in given:
            draft.set("train.steps", read_value("train-iters", given["train-iters"], int))
        return
    asked = samples = read_value("train-samples", given["train-samples"], int)
    if batches is not None:
        # A step of the ramp is never cut short, even if it passes the end of the ramp or of the run.
        ramp = 0 if batches.rampup is None else batches.samples(batches.steps(min(batches.rampup[2], asked) + 1))
        samples = ramp + max(0, asked - ramp) // batches.global_batch * batches.global_batch
    draft.set("train.samples", samples or asked)
    if samples not in (0, asked):
        draft.notes.append(
            f"--train-samples {asked}: {samples} in whole steps. Megatron shuffles {asked} samples, so if those begin another epoch "
            "its sample order differs"
        )


def _warmup(draft: Draft, given: Arguments, unit: str, end: int | None) -> None:
    """Translate the warmup: its length in samples, which --lr-warmup-fraction can make fractional, and its first learning rate."""
    name, lr = f"lr-warmup-{unit}", draft.get("optim.lr")
    warmup: float = read_value(name, given.get(name) or ["0"], int)
    suffix, start = _SUFFIX[unit], read_value("lr-warmup-init", given.get("lr-warmup-init") or ["0.0"], float)
    if "lr-warmup-fraction" in given:
        fraction = read_value("lr-warmup-fraction", given["lr-warmup-fraction"], float)
        batch = draft.get("train.global_batch")
        if warmup:
            draft.left.append(f"--{name} {warmup}: Megatron takes it or --lr-warmup-fraction, not both")
        if end is None or (unit == "iters" and batch is None):
            draft.left.append(
                f"--lr-warmup-fraction {fraction:g}: the length of the schedule is not known; give --train-iters and "
                "--global-batch-size, or set optim.warmup and optim.warmup_init"
            )
            return
        warmup, suffix = fraction * (end * batch if unit == "iters" else end), "sp"
        if unit == "iters" and warmup % batch == 0:
            warmup, suffix = warmup / batch, "ba"
    if warmup == 0 and LR_SCHEDULES[draft.get("optim.schedule")].by_root and lr is not None:
        # Megatron then counts from the first sample, not from the first step.
        warmup, suffix, start = 1, "sp", lr
    if warmup:
        draft.set("optim.warmup", f"{warmup:.17g}{suffix}")
        draft.set("optim.warmup_init", start)
    elif "lr-warmup-init" in given:
        draft.notes.append("--lr-warmup-init: ignored, as in Megatron without a warmup")


def _wsd(draft: Draft, given: Arguments, unit: str) -> None:
    shape = first_word(given, "lr-wsd-decay-style", "exponential")
    if not LR_SCHEDULES[draft.get("optim.schedule")].is_stable:
        read_by_wsd = [name for name in given if name.startswith("lr-wsd-")]
        draft.notes.extend(f"--{name}: Megatron reads it with --lr-decay-style WSD" for name in read_by_wsd)
        return
    draft.set("optim.decay_shape", _WSD_SHAPES.get(shape, "linear"))
    if shape not in _WSD_SHAPES:
        draft.left.append(f"--lr-wsd-decay-style {shape}: replaced by linear")
    if (name := f"lr-wsd-decay-{unit}") in given:
        draft.set("optim.decay", f"{read_value(name, given[name], int)}{_SUFFIX[unit]}")


def _weight_decay(draft: Draft, given: Arguments) -> None:
    """Translate weight decay, which is constant in Argosy.

    If Megatron's weight decay changes, Megatron reads --start- and --end-weight-decay instead of --weight-decay.
    """
    style = first_word(given, "weight-decay-incr-style", "constant")
    source = "weight-decay" if style == "constant" else "end-weight-decay"
    decay = read_value(source, given.get(source) or given.get("weight-decay") or ["0.01"], number)
    draft.set("optim.weight_decay", decay)
    for name in ("weight-decay-incr-style", "start-weight-decay", "end-weight-decay"):
        if name in given and not (name == "weight-decay-incr-style" and style == "constant"):
            draft.left.append(f"--{name} {first_word(given, name)}: weight decay is constant in Argosy: {decay:g}")
    if style != "constant" and "weight-decay" in given:
        draft.notes.append(f"--weight-decay: Megatron does not read it with --weight-decay-incr-style {style}")

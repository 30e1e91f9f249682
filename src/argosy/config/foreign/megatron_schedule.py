"""Megatron's length of the run, its learning rate and its weight decay, as keys of a run spec.

Its OptimizerParamScheduler counts in samples consumed before a step. The rate starts at --lr-warmup-init, has the peak once the
warm-up is consumed, and has --min-lr after --lr-decay-iters (or -samples), which are the run's unless given: so the last step of a
run does not have it. `optim.warmup_init` and `optim.decay_end` say the same here.
"""

from __future__ import annotations

from argosy.config.batches import Batches
from argosy.config.foreign.draft import Draft
from argosy.config.foreign.megatron_words import Arguments, first_word, number, read_value

SCHEDULE_ARGUMENTS = (
    "train-iters", "train-samples", "rampup-batch-size", "lr", "min-lr", "lr-decay-style", "lr-decay-iters", "lr-decay-samples", "lr-warmup-iters",
    "lr-warmup-samples", "lr-warmup-fraction", "lr-warmup-init", "lr-wsd-decay-style", "lr-wsd-decay-iters", "lr-wsd-decay-samples",
    "weight-decay", "start-weight-decay", "end-weight-decay", "weight-decay-incr-style",
)  # fmt: skip
_KINDS = {"cosine": "cosine", "linear": "linear", "constant": "constant", "inverse-square-root": "inverse_sqrt", "WSD": "wsd"}  # fmt: skip
_WSD_SHAPES = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt", "exponential": "exponential"}
_SUFFIX = {"iters": "ba", "samples": "sp"}


def describe_schedule(draft: Draft, given: Arguments) -> None:
    """The batch is known by now."""
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
    kind = _KINDS.get(style, "cosine")
    draft.set("optim.schedule", kind)
    if style not in _KINDS:
        draft.left.append(f"--lr-decay-style {style}: cosine takes its place")
    length = given.get(f"lr-decay-{unit}") or given.get(f"train-{unit}")
    end = None if length is None else read_value(f"lr-decay-{unit}", length, int)
    if kind != "constant" and end is not None:
        draft.set("optim.decay_end", f"{end}{_SUFFIX[unit]}")
    elif f"lr-decay-{unit}" in given:
        draft.notes.append(f"--lr-decay-{unit}: a constant learning rate has no end")
    _warmup(draft, given, unit, end)
    _wsd(draft, given, unit)


def _batches(draft: Draft, given: Arguments) -> Batches | None:
    """The sizes of steps, where they are known and can be."""
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
            "--rampup-batch-size with --train-iters: Megatron refuses them together; the batch grows here"
        )
    batches, share = Batches(batch, (start, increment, samples)), samples / ((batch - start) // increment)
    for consumed, size in batches.stages:
        # Megatron divides in floating point, which can fall short of the whole number that ends a share of the samples.
        if consumed <= samples and start + int(consumed / share) * increment != size:
            draft.left.append(
                f"--rampup-batch-size {start} {increment} {samples}: after {consumed} samples a step has {size} samples here; "
                f"Megatron's {consumed} / {share} rounds below a whole number, and its batch grows a step later"
            )
            break
    return batches


def _length(draft: Draft, given: Arguments, batches: Batches | None) -> None:
    """Megatron leaves the last batch out where it is not whole; the length here is rounded up to whole batches."""
    if "train-samples" not in given:
        if "train-iters" in given:
            draft.set("train.steps", read_value("train-iters", given["train-iters"], int))
        return
    asked = samples = read_value("train-samples", given["train-samples"], int)
    if batches is not None:
        # Steps of the ramp are taken whole, past its end and past the end of the run.
        ramp = 0 if batches.rampup is None else batches.samples(batches.steps(min(batches.rampup[2], asked) + 1))
        samples = ramp + max(0, asked - ramp) // batches.global_batch * batches.global_batch
    draft.set("train.samples", samples or asked)
    if samples not in (0, asked):
        draft.notes.append(
            f"--train-samples {asked}: in whole steps {samples}. Megatron shuffles {asked} samples, so where those begin another "
            "epoch its order of samples is another"
        )


def _warmup(draft: Draft, given: Arguments, unit: str, end: int | None) -> None:
    """As many samples as Megatron's, which need not be whole where they are a fraction; and where the rise starts."""
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
                f"--lr-warmup-fraction {fraction:g}: of a schedule whose samples are not known; give --train-iters and "
                "--global-batch-size, or set optim.warmup and optim.warmup_init"
            )
            return
        warmup, suffix = fraction * (end * batch if unit == "iters" else end), "sp"
        if unit == "iters" and warmup % batch == 0:
            warmup, suffix = warmup / batch, "ba"
    elif warmup == 0 and draft.get("optim.schedule") == "inverse_sqrt" and lr is not None:
        # Megatron then counts from the first sample, not from the first step.
        warmup, suffix, start = 1, "sp", lr
    if warmup:
        draft.set("optim.warmup", f"{warmup:.17g}{suffix}")
        draft.set("optim.warmup_init", start)
    elif "lr-warmup-init" in given:
        draft.notes.append("--lr-warmup-init: without a warm-up Megatron does not read it either")


def _wsd(draft: Draft, given: Arguments, unit: str) -> None:
    shape = first_word(given, "lr-wsd-decay-style", "exponential")
    if draft.get("optim.schedule") != "wsd":
        read_by_wsd = [name for name in given if name.startswith("lr-wsd-")]
        draft.notes.extend(f"--{name}: Megatron reads it with --lr-decay-style WSD" for name in read_by_wsd)
        return
    draft.set("optim.decay_shape", _WSD_SHAPES.get(shape, "linear"))
    if shape not in _WSD_SHAPES:
        draft.left.append(f"--lr-wsd-decay-style {shape}: the fall is linear here")
    if (name := f"lr-wsd-decay-{unit}") in given:
        draft.set("optim.decay", f"{read_value(name, given[name], int)}{_SUFFIX[unit]}")


def _weight_decay(draft: Draft, given: Arguments) -> None:
    """One number here. Where Megatron's grows, it reads --start- and --end-weight-decay instead of --weight-decay."""
    style = first_word(given, "weight-decay-incr-style", "constant")
    source = "weight-decay" if style == "constant" else "end-weight-decay"
    decay = read_value(source, given.get(source) or given.get("weight-decay") or ["0.01"], number)
    draft.set("optim.weight_decay", decay)
    for name in ("weight-decay-incr-style", "start-weight-decay", "end-weight-decay"):
        if name in given and not (name == "weight-decay-incr-style" and style == "constant"):
            draft.left.append(
                f"--{name} {first_word(given, name)}: weight decay does not change while training; it is {decay:g} throughout"
            )
    if style != "constant" and "weight-decay" in given:
        draft.notes.append(f"--weight-decay: Megatron does not read it with --weight-decay-incr-style {style}")

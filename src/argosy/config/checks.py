"""Consistency checks between keys of the run spec. Each refusal has the arithmetic and the nearest values that work.

These checks need the spec alone and run before any file or device is touched. Checks that need the data (vocabulary, size of
the splits) run where the data is opened.
"""

from __future__ import annotations

from argosy.config.batches import divisors
from argosy.config.data_checks import check_data
from argosy.config.default_micro_batch import is_micro_batch_open
from argosy.config.fp8_rules import block_widths, check_fp8_tokens, require_fp8_layers
from argosy.config.layout import check_layout
from argosy.config.lr_schedules import check_schedule
from argosy.config.optimizers import RULES
from argosy.config.origins import Origins
from argosy.config.schema import RunSpec
from argosy.config.units import LENGTH_UNITS
from argosy.errors import ArgosyError
from argosy.tasks.task_registry import task_of


def check(spec: RunSpec, origins: Origins) -> None:
    """Raise an ArgosyError for the first pair of keys that contradict each other."""
    _check_length(spec, origins)
    check_layout(spec, origins)
    _check_batch(spec, origins)
    _check_rampup(spec, origins)
    _check_sequence(spec, origins)
    if spec.train.precision == "fp8":
        require_fp8_layers(block_widths(spec.model), origins.get("train.precision"))
        check_fp8_tokens(spec, origins)
    check_data(spec, origins)
    _check_writing(spec, origins)
    _check_optimiser(spec, origins)
    check_schedule(spec, origins)


def _check_length(spec: RunSpec, origins: Origins) -> None:
    given = {key: getattr(spec.train, key) for key in LENGTH_UNITS}
    given = {key: value for key, value in given.items() if value is not None}
    if not given:
        raise ArgosyError(
            "config.missing-key",
            "the length of the run is not given",
            key="train.steps",
            fix="give one of train.steps, train.tokens (for example 20B), train.samples or train.epochs",
        )
    if len(given) > 1:
        raise ArgosyError(
            "config.conflict",
            "the length of the run is given more than once: "
            + ", ".join(f"train.{k} = {v:g}" for k, v in given.items()),
            key=f"train.{list(given)[1]}",
            origin=origins.get(f"train.{list(given)[1]}"),
            fix="keep one; set the others to null to override a file",
        )


def _check_rampup(spec: RunSpec, origins: Origins) -> None:
    ramp, batch = spec.train.batch_rampup, spec.train.global_batch
    if ramp is None:
        return
    share = spec.parallel.micro_batch * spec.parallel.data_parallel
    grows, left = batch - ramp.start, (batch - ramp.start) % ramp.increment
    if grows <= 0:
        key, why = "start", f"it starts at {ramp.start} samples, which is not below train.global_batch {batch}"
        fix = f"a start below {batch}, or no batch_rampup"
    elif left:
        key, why = (
            "increment",
            f"{batch} - {ramp.start} = {grows} is not a multiple of {ramp.increment}: {left} are left over",
        )
        fix = f"an increment that divides {grows}: {', '.join(map(str, _divisors_near(grows, ramp.increment)))}"
    elif ramp.start % share or ramp.increment % share:
        key = "start" if ramp.start % share else "increment"
        why = (
            f"batches of {ramp.start}, {ramp.start + ramp.increment}, … samples are not all multiples of micro_batch "
            f"{spec.parallel.micro_batch} x {spec.parallel.data_parallel} data-parallel ranks = {share}"
        )
        fix = f"a start and an increment that are multiples of {share}, or a smaller parallel.micro_batch"
    else:
        return
    raise ArgosyError(
        "config.arithmetic",
        f"the batch size cannot ramp up as requested: {why}",
        key=f"train.batch_rampup.{key}",
        value=getattr(ramp, key),
        origin=origins.get(f"train.batch_rampup.{key}"),
        fix=fix,
    )


def _divisors_near(number: int, wanted: int) -> list[int]:
    return sorted(sorted(divisors(number), key=lambda d: abs(d - wanted))[:2])


def _check_batch(spec: RunSpec, origins: Origins) -> None:
    batch, micro, ranks = spec.train.global_batch, spec.parallel.micro_batch, spec.parallel.data_parallel
    share = micro * ranks
    if batch % share:
        unit, named = share, f"micro_batch {micro} x {ranks} data-parallel ranks = {share}"
        # A micro-batch that was not given adapts to the batch.
        if is_micro_batch_open(origins) and batch % ranks:
            unit, named = ranks, f"{ranks} data-parallel ranks"
        below, above = batch // unit * unit, (batch // unit + 1) * unit
        near = f"{below} or {above}" if below else str(above)
        smaller = next((n for n in range(min(micro, batch), 0, -1) if batch % (n * ranks) == 0), None)
        raise ArgosyError(
            "config.arithmetic",
            f"train.global_batch {batch} is not a multiple of {named} ({batch} / {unit} = {batch / unit:.3g})",
            key="train.global_batch",
            value=batch,
            origin=origins.get("train.global_batch"),
            fix=f"use global_batch {near}" + (f", or parallel.micro_batch {smaller}" if smaller else ""),
        )


def _check_sequence(spec: RunSpec, origins: Origins) -> None:
    if spec.data.seq_len > spec.model.max_seq_len:
        raise ArgosyError(
            "config.arithmetic",
            f"samples of {spec.data.seq_len} tokens are longer than the model's {spec.model.max_seq_len} positions",
            key="data.seq_len",
            value=spec.data.seq_len,
            origin=origins.get("data.seq_len"),
            fix=f"data.seq_len={spec.model.max_seq_len}, or model.max_seq_len={spec.data.seq_len}",
        )


def _check_writing(spec: RunSpec, origins: Origins) -> None:
    """Refuse samples of text and scores on tasks from a model that cannot continue a text."""
    tasks = None if spec.eval is None else spec.eval.tasks
    if tasks is not None and not (tasks.names or tasks.icl):
        raise ArgosyError(
            "config.missing-key",
            "eval.tasks names no task",
            key="eval.tasks.names",
            origin=origins.get("eval.tasks"),
            fix="eval.tasks.names=[arc_easy,hellaswag], or leave eval.tasks out",
        )
    if task_of(spec).writes == "continuation":
        return
    for key, asked in (("log.samples", spec.log.samples), ("eval.tasks", tasks)):
        if asked is not None:
            raise ArgosyError(
                "config.conflict",
                f"only decoders continue a prompt, and this model reads {task_of(spec).samples}",
                key=key,
                origin=origins.get(key),
                fix=f"leave {key} out",
            )


def _check_optimiser(spec: RunSpec, origins: Origins) -> None:
    """Refuse keys of an optimiser that is not the one chosen, nor takes its rest."""
    chosen = spec.optim.rule
    for rule in RULES.values():
        if rule in chosen.parts:
            continue
        if not rule.inline and getattr(spec.optim, rule.name) is not None:
            section = f"optim.{rule.name}"
            raise ArgosyError(
                "config.conflict",
                f"{section} is given, but the optimiser is {chosen.name}",
                key=section,
                origin=origins.get(section),
                fix=f"optim.name={rule.name}, or leave the section out",
            )
        for key in rule.keys.model_fields if rule.inline else ():
            path = rule.key_path(key)
            if origins.get(path, "default") != "default":
                own = f"write it as {chosen.key_path(key)}" if key in chosen.keys.model_fields else "leave it out"
                raise ArgosyError(
                    "config.conflict",
                    f"{path} is {rule.title}'s, and {chosen.title} does not read it",
                    key=path,
                    origin=origins[path],
                    fix=f"{own}, or optim.name={rule.name}",
                )

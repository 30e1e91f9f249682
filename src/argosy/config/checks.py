"""The arithmetic between keys: each check refuses with the numbers and the nearest values that work.

What can be known from the spec alone is checked here, before any file or device is touched. Checks that need the data
(vocabulary, size of the splits) are made where the data is opened.
"""

from __future__ import annotations

import math

from argosy.config.data_checks import check_data
from argosy.config.layout import check_layout
from argosy.config.lr_phases import check_schedule
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError
from argosy.tasks.registry import task_of

Origins = dict[str, str]
FP8_ALIGNMENT = 16  # the hardware's: every dimension of a product of 8-bit floats is a multiple of it


def check(spec: RunSpec, origins: Origins) -> None:
    _check_length(spec, origins)
    check_layout(spec, origins)
    _check_batch(spec, origins)
    _check_rampup(spec, origins)
    _check_sequence(spec, origins)
    _check_fp8(spec, origins)
    check_data(spec, origins)
    _check_optimiser(spec, origins)
    check_schedule(spec, origins)


def _check_length(spec: RunSpec, origins: Origins) -> None:
    given = {key: getattr(spec.train, key) for key in ("steps", "tokens", "samples", "epochs")}
    given = {key: value for key, value in given.items() if value is not None}
    if not given:
        raise ArgosyError(
            "config.missing-key",
            "the run has no length",
            key="train.steps",
            fix="give one of train.steps, train.tokens (as 20B), train.samples or train.epochs",
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
        key, why = "start", f"it starts with {ramp.start} samples, and train.global_batch is {batch}: nothing to grow"
        fix = f"a start below {batch}, or no batch_rampup"
    elif left:
        key, why = (
            "increment",
            f"from {ramp.start} to {batch} are {grows}, no multiple of {ramp.increment}: {left} are left over",
        )
        fix = f"an increment that divides {grows}: {', '.join(map(str, _divisors_near(grows, ramp.increment)))}"
    elif ramp.start % share or ramp.increment % share:
        key = "start" if ramp.start % share else "increment"
        why = (
            f"steps of {ramp.start}, {ramp.start + ramp.increment}, … samples are not all multiples of micro_batch "
            f"{spec.parallel.micro_batch} x {spec.parallel.data_parallel} data-parallel ranks = {share}"
        )
        fix = f"a start and an increment that are multiples of {share}, or a smaller parallel.micro_batch"
    else:
        return
    raise ArgosyError(
        "config.arithmetic",
        f"the batch cannot grow as asked: {why}",
        key=f"train.batch_rampup.{key}",
        value=getattr(ramp, key),
        origin=origins.get(f"train.batch_rampup.{key}"),
        fix=fix,
    )


def _divisors_near(number: int, wanted: int) -> list[int]:
    divisors = {d for n in range(1, math.isqrt(number) + 1) if number % n == 0 for d in (n, number // n)}
    return sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:2])


def _check_batch(spec: RunSpec, origins: Origins) -> None:
    batch, micro, ranks = spec.train.global_batch, spec.parallel.micro_batch, spec.parallel.data_parallel
    share = micro * ranks
    if batch % share:
        below, above = batch // share * share, (batch // share + 1) * share
        near = f"{below} or {above}" if below else str(above)
        smaller = next((n for n in range(min(micro, batch), 0, -1) if batch % (n * ranks) == 0), None)
        raise ArgosyError(
            "config.arithmetic",
            f"train.global_batch {batch} is not a multiple of micro_batch {micro} x {ranks} data-parallel ranks = {share} "
            f"({batch} / {share} = {batch / share:.3g})",
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


def _check_fp8(spec: RunSpec, origins: Origins) -> None:
    others = {key.rpartition(".")[2]: length for key, length in task_of(spec).other_lengths(spec).items()}
    for name, known in {"seq_len": spec.data.seq_len, **others}.items():
        length = known or 1  # where it is not known here, any number of rows of 16 will do
        tokens = spec.parallel.micro_batch * length
        if spec.train.precision != "fp8" or tokens % FP8_ALIGNMENT == 0:
            continue
        needed = FP8_ALIGNMENT // math.gcd(length, FP8_ALIGNMENT)
        product = f"micro_batch {spec.parallel.micro_batch} x {name} {length} = {tokens}"
        if known is None:
            product = (
                f"T5's targets may be of any length, and micro_batch {spec.parallel.micro_batch} is no multiple of it"
            )
        raise ArgosyError(
            "config.arithmetic",
            f"8-bit products need a multiple of {FP8_ALIGNMENT} tokens in a forward pass; {product}",
            key="train.precision",
            value="fp8",
            origin=origins.get("train.precision"),
            fix=f"parallel.micro_batch={needed} or a multiple of it"
            + (f", or a data.seq_len that is a multiple of {FP8_ALIGNMENT}" if name == "seq_len" else ""),
        )


def _check_optimiser(spec: RunSpec, origins: Origins) -> None:
    if spec.optim.muon is not None and spec.optim.name != "muon":
        raise ArgosyError(
            "config.conflict",
            f"optim.muon is given, but the optimiser is {spec.optim.name}",
            key="optim.muon",
            origin=origins.get("optim.muon"),
            fix="optim.name=muon, or leave the section out",
        )

"""The arithmetic between keys: each check refuses with the numbers and the nearest values that work.

What can be known from the spec alone is checked here, before any file or device is touched. Checks that need the data
(vocabulary, size of the splits) are made where the data is opened.
"""

from __future__ import annotations

import math

from argosy.config.layout import check_layout
from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError

Origins = dict[str, str]
FP8_ALIGNMENT = 16  # the hardware's: every dimension of a product of 8-bit floats is a multiple of it


def check(spec: RunSpec, origins: Origins) -> None:
    _check_length(spec, origins)
    check_layout(spec, origins)
    _check_batch(spec, origins)
    _check_rampup(spec, origins)
    _check_sequence(spec, origins)
    _check_fp8(spec, origins)
    _check_samples(spec, origins)
    _check_split(spec, origins)
    _check_evaluation(spec, origins)
    _check_weights(spec)
    _check_caches(spec)
    _check_recipes(spec)
    _check_optimiser(spec, origins)
    _check_schedule(spec, origins)


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
    lengths = {"seq_len": spec.data.seq_len}
    if spec.data.ict is not None:
        lengths["query_len"] = spec.data.ict.query_len
    if spec.data.t5 is not None:
        lengths["targets"] = 1  # how many there are is not known here: any number of rows of 16 will do
    for name, length in lengths.items():
        tokens = spec.parallel.micro_batch * length
        if spec.train.precision != "fp8" or tokens % FP8_ALIGNMENT == 0:
            continue
        needed = FP8_ALIGNMENT // math.gcd(length, FP8_ALIGNMENT)
        raise ArgosyError(
            "config.arithmetic",
            f"8-bit products need a multiple of {FP8_ALIGNMENT} tokens in a forward pass; micro_batch {spec.parallel.micro_batch} x "
            f"{name} {length} = {tokens}",
            key="train.precision",
            value="fp8",
            origin=origins.get("train.precision"),
            fix=f"parallel.micro_batch={needed} or a multiple of it"
            + (f", or a data.seq_len that is a multiple of {FP8_ALIGNMENT}" if name == "seq_len" else ""),
        )


def _check_samples(spec: RunSpec, origins: Origins) -> None:
    """Keys for samples of another kind than the model's would be ignored."""
    data, model = spec.data, spec.model
    for section in ("bert", "t5", "ict"):
        if getattr(data, section) is not None and section != model.samples:
            raise ArgosyError(
                "config.conflict",
                f"data.{section} describes samples this model is not trained on: it reads {_samples_of(spec)}",
                key=f"data.{section}",
                fix=f"leave data.{section} out, or choose another model",
            )
    if model.samples == "windows":
        if data.reset_positions and model.positions == "alibi" and not data.document_mask:
            raise ArgosyError(
                "config.conflict",
                "ALiBi knows the distance of two tokens and no positions, so that there is nothing to reset",
                key="data.reset_positions",
                value=True,
                origin=origins.get("data.reset_positions"),
                fix="data.document_mask=true, which keeps documents apart, or leave data.reset_positions out",
            )
        return
    for key, default in (
        ("order", "argosy"), ("order_cache", None), ("fim", None), ("mask_eod", False), ("document_mask", False),
        ("reset_positions", False),
    ):  # fmt: skip
        if getattr(data, key) != default:
            raise ArgosyError(
                "config.conflict",
                f"data.{key} is for decoders, which read windows of the token stream; this model reads {_samples_of(spec)}",
                key=f"data.{key}",
                value=str(getattr(data, key)),
                origin=origins.get(f"data.{key}"),
                fix="leave it out",
            )
    if model.samples == "ict" and spec.train.z_loss:
        raise ArgosyError(
            "config.conflict",
            "the z-loss is of logits over a vocabulary, and a model with retrieval has none",
            key="train.z_loss",
            value=spec.train.z_loss,
            origin=origins.get("train.z_loss"),
            fix="leave it out",
        )
    if data.ict is not None and data.ict.query_len > model.max_seq_len:
        raise ArgosyError(
            "config.arithmetic",
            f"queries of {data.ict.query_len} tokens are longer than the model's {model.max_seq_len} positions",
            key="data.ict.query_len",
            value=data.ict.query_len,
            origin=origins.get("data.ict.query_len"),
            fix=f"data.ict.query_len={model.max_seq_len}, or less",
        )
    if model.samples == "ict" and spec.parallel.micro_batch < 2:
        raise ArgosyError(
            "config.arithmetic",
            "a query's wrong answers are the other blocks of its micro-batch: with a micro_batch of 1 there are none",
            key="parallel.micro_batch",
            value=spec.parallel.micro_batch,
            origin=origins.get("parallel.micro_batch"),
            fix="as large a micro_batch as fits, and a global_batch that is a multiple of it",
        )


def _samples_of(spec: RunSpec) -> str:
    kinds = {
        "windows": "windows of the token stream",
        "bert": "masked segments (data.bert)",
        "t5": "corrupted spans (data.t5)",
        "ict": "queries and blocks (data.ict)",
    }
    return kinds[spec.model.samples]


def _check_split(spec: RunSpec, origins: Origins) -> None:
    split = spec.data.split
    if min(split) < 0 or split[0] <= 0:
        raise ArgosyError(
            "config.bad-value",
            "the shares must not be negative, and training must get some: "
            f"training {split[0]:g}, validation {split[1]:g}, test {split[2]:g}",
            key="data.split",
            value=list(split),
            origin=origins.get("data.split"),
            fix="data.split=[98,2,0]",
        )


def _check_evaluation(spec: RunSpec, origins: Origins) -> None:
    """Seen in the field: zero evaluation iterations with a validation split, or the reverse, dies in a bare assert."""
    if spec.eval is None:
        return
    if spec.eval.batches == 0:
        raise ArgosyError(
            "eval.half-off",
            f"eval.batches is 0, but evaluation is on: every {spec.eval.every} it would measure 0 tokens",
            key="eval.batches",
            value=0,
            origin=origins.get("eval.batches"),
            fix="`eval: off` turns evaluation off; otherwise eval.batches=10",
        )
    if spec.data.split[1] == 0:
        raise ArgosyError(
            "eval.half-off",
            f"data.split gives validation {spec.data.split[1]:g} of {sum(spec.data.split):g} shares, but evaluation is on "
            f"(every {spec.eval.every}, {spec.eval.batches} batches)",
            key="data.split",
            value=list(spec.data.split),
            origin=origins.get("data.split"),
            fix="`eval: off` turns evaluation off; otherwise give validation a share: data.split=[98,2,0]",
        )


def _check_weights(spec: RunSpec) -> None:
    weighted = [source.weight is not None for source in spec.data.train]
    if any(weighted) and not all(weighted):
        bare = spec.data.train[weighted.index(False)].path
        raise ArgosyError(
            "config.conflict",
            f"{sum(weighted)} of {len(weighted)} corpora have a weight; {bare} has none",
            key=f"data.train.{weighted.index(False)}.weight",
            fix="give every corpus a weight, or none (then they mix by token count)",
        )


def _check_caches(spec: RunSpec) -> None:
    for number, source in enumerate(spec.data.train):
        remote = "://" in source.path
        if remote and source.cache is None:
            raise ArgosyError(
                "config.missing-key",
                f"{source.path} is read through a local cache, and none is named",
                key=f"data.train.{number}.cache",
                fix="name a directory on a local disk: {path: …, cache: /local/cache, cache_limit: 200GB}",
            )
        if not remote and (source.cache is not None or source.cache_limit is not None):
            raise ArgosyError(
                "config.conflict",
                f"{source.path} is a local path, and needs no cache",
                key=f"data.train.{number}.cache",
                fix="leave cache and cache_limit out, or give a URL",
            )


def _check_recipes(spec: RunSpec) -> None:
    for number, source in enumerate(spec.data.train):
        recipe, key = source.prepare, f"data.train.{number}.prepare"
        if recipe is None:
            continue
        if (recipe.fetch is None) == (not recipe.inputs):
            raise ArgosyError(
                "config.conflict" if recipe.inputs else "config.missing-key",
                "a corpus is made from what is fetched or from files that are there, one of them",
                key=f"{key}.fetch",
                fix="give fetch (a data set or URL) or inputs (files), not both",
            )
        idle = [k for k in ("config", "split", "sample", "revision", "raw") if getattr(recipe, k) is not None]
        if recipe.fetch is None and idle:
            raise ArgosyError(
                "config.conflict",
                f"{idle[0]} says what to fetch, and nothing is fetched",
                key=f"{key}.{idle[0]}",
                fix="give fetch, or leave it out",
            )
        if "://" in source.path and not source.path.startswith("file://"):
            raise ArgosyError(
                "config.conflict",
                f"corpora are made in directories, and {source.path} is none",
                key=f"data.train.{number}.path",
                fix="make it on a mounted volume; file:///PATH with a cache streams it from there",
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


def _check_schedule(spec: RunSpec, origins: Origins) -> None:
    if spec.optim.min_lr > spec.optim.lr:
        raise ArgosyError(
            "config.arithmetic",
            f"the final learning rate {spec.optim.min_lr:g} is above the peak {spec.optim.lr:g}",
            key="optim.min_lr",
            value=spec.optim.min_lr,
            origin=origins.get("optim.min_lr"),
            fix=f"optim.min_lr={spec.optim.lr / 10:g}",
        )
    given = {"optim.warmup": spec.optim.warmup, "optim.decay": spec.optim.decay}
    for key, duration in given.items():
        if duration is not None and duration.unit == "seconds":
            raise ArgosyError(
                "config.bad-value",
                f"the learning rate is a function of the step, so {key.removeprefix('optim.')} cannot be a time",
                key=key,
                value=str(duration),
                origin=origins.get(key),
                fix="give it in steps (200ba) or tokens (300M)",
            )
    _check_decay(spec, origins)
    steps = spec.train.length.steps(spec.train.batches, seq_len=spec.data.seq_len)
    if steps is not None:
        lengths = [d.steps(spec.train.batches, seq_len=spec.data.seq_len) if d else 0 for d in given.values()]
        check_phases(spec, warmup=lengths[0] or 0, decay=lengths[1] or 0, steps=steps, origins=origins)


def _check_decay(spec: RunSpec, origins: Origins) -> None:
    optim = spec.optim
    if optim.schedule == "wsd" and optim.decay is None:
        raise ArgosyError(
            "config.missing-key",
            "a wsd schedule stays at the peak until its decay begins, and no decay is given",
            key="optim.decay",
            fix="a tenth to a fifth of the run is common: optim.decay=2000 (steps) or 10B (tokens)",
        )
    for key, value in (("optim.decay", optim.decay), ("optim.decay_shape", optim.decay_shape)):
        if optim.schedule != "wsd" and value is not None:
            raise ArgosyError(
                "config.conflict",
                f"{key} belongs to the wsd schedule, and this one is {optim.schedule}",
                key=key,
                value=str(value),
                origin=origins.get(key),
                fix="optim.schedule=wsd, or leave the key out",
            )


def check_phases(spec: RunSpec, *, warmup: int, decay: int, steps: int, origins: Origins | None = None) -> None:
    """The parts of the schedule against the whole. Again once the data is open, for lengths in epochs."""
    origins = origins or {}
    if warmup and warmup >= steps:
        raise ArgosyError(
            "config.arithmetic",
            f"the warm-up of {warmup} steps is not shorter than the run of {steps} steps",
            key="optim.warmup",
            value=str(spec.optim.warmup),
            origin=origins.get("optim.warmup"),
            fix=f"optim.warmup={max(0, steps // 10)}",
        )
    if warmup + decay > steps:
        raise ArgosyError(
            "config.arithmetic",
            f"warm-up and decay do not fit in the run: {warmup} + {decay} = {warmup + decay} steps, and it has {steps}",
            key="optim.decay",
            value=str(spec.optim.decay),
            origin=origins.get("optim.decay"),
            fix=f"optim.decay={steps - warmup} or less",
        )

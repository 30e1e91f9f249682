"""Data and evaluation against the model and each other, as far as the spec alone tells."""

from __future__ import annotations

from argosy.config.schema import RunSpec
from argosy.errors import ArgosyError

Origins = dict[str, str]


def check_data(spec: RunSpec, origins: Origins) -> None:
    _check_samples(spec, origins)
    _check_split(spec, origins)
    _check_evaluation(spec, origins)
    _check_weights(spec)
    _check_caches(spec)
    _check_recipes(spec)


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
    if model.samples == "ict":
        _check_retrieval(spec, origins)


def _check_retrieval(spec: RunSpec, origins: Origins) -> None:
    data, model = spec.data, spec.model
    if spec.train.z_loss:
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
    if spec.parallel.micro_batch < 2:
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

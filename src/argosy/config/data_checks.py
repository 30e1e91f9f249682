"""Checks of the data and evaluation settings against the model and each other, from the spec alone."""

from __future__ import annotations

from argosy.config.origins import Origins
from argosy.config.schema import PrepareSpec, RunSpec
from argosy.errors import ArgosyError
from argosy.tasks.task_registry import SECTIONS, task_of


def check_data(spec: RunSpec, origins: Origins) -> None:
    _check_samples(spec, origins)
    _check_split(spec, origins)
    _check_evaluation(spec, origins)
    _check_weights(spec)
    _check_caches(spec)
    _check_recipes(spec)


def _check_samples(spec: RunSpec, origins: Origins) -> None:
    """Refuse keys for another kind of samples than the model's, which would be ignored."""
    task = task_of(spec)
    for section in SECTIONS:
        if getattr(spec.data, section) is not None and section != task.section:
            raise ArgosyError(
                "config.conflict",
                f"data.{section} describes samples this model is not trained on: it reads {task.samples}",
                key=f"data.{section}",
                fix=f"leave data.{section} out, or choose another model",
            )
    task.check(spec, origins)


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


def unused_share(spec: RunSpec) -> str | None:
    """Say that documents are held back for validation although corpora of their own are evaluated; None if none are."""
    split = spec.data.split
    if not spec.data.validation or split[1] == 0:
        return None
    return (
        f"data.split holds {split[1] / sum(split):.2%} of data.train back for validation, and data.validation is evaluated instead: "
        "leave data.split out to train on all of it"
    )


def _check_evaluation(spec: RunSpec, origins: Origins) -> None:
    """Refuse evaluation that is only half on. In other trainers, 0 evaluation batches or no validation split ends in a bare assert."""
    if spec.eval is None:
        if spec.checkpoint.best is not None:
            raise ArgosyError(
                "eval.half-off",
                "checkpoint.best needs validation losses, and evaluation is off",
                key="checkpoint.best",
                value=spec.checkpoint.best,
                origin=origins.get("checkpoint.best"),
                fix="leave checkpoint.best out, or turn evaluation on: eval.every=100ba",
            )
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
    if spec.data.split[1] == 0 and not spec.data.validation:
        raise ArgosyError(
            "eval.half-off",
            f"data.split gives validation {spec.data.split[1]:g} of {sum(spec.data.split):g} shares, but evaluation is on "
            f"(every {spec.eval.every}, {spec.eval.batches} batches)",
            key="data.split",
            value=list(spec.data.split),
            origin=origins.get("data.split"),
            fix="`eval: off` turns evaluation off; otherwise give validation a share, data.split=[98,2,0], or a corpus, data.validation=PATH",
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
    for number, source in enumerate(spec.data.validation):
        if source.weight is not None:
            raise ArgosyError(
                "config.conflict",
                f"{source.path} is evaluated on, and weights are for the blend to train on",
                key=f"data.validation.{number}.weight",
                value=source.weight,
                fix="leave it out: each corpus has a validation loss of its own, and all count by their tokens",
            )


def _check_caches(spec: RunSpec) -> None:
    for key, source in spec.data.sources.items():
        remote = "://" in source.path
        if remote and source.cache is None:
            raise ArgosyError(
                "config.missing-key",
                f"{source.path} is read through a local cache, and none is named",
                key=f"{key}.cache",
                fix="name a directory on a local disk: {path: …, cache: /local/cache, cache_limit: 200GB}",
            )
        if not remote and (source.cache is not None or source.cache_limit is not None):
            raise ArgosyError(
                "config.conflict",
                f"{source.path} is a local path, and needs no cache",
                key=f"{key}.cache",
                fix="leave cache and cache_limit out, or give a URL",
            )


def _check_recipes(spec: RunSpec) -> None:
    for place, source in spec.data.sources.items():
        recipe, key = source.prepare, f"{place}.prepare"
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
        _check_curation(spec, recipe, key)
        if "://" in source.path and not source.path.startswith("file://"):
            raise ArgosyError(
                "config.conflict",
                f"corpora are made in directories, and {source.path} is none",
                key=f"{place}.path",
                fix="make it on a mounted volume; file:///PATH with a cache streams it from there",
            )


def _check_curation(spec: RunSpec, recipe: PrepareSpec, key: str) -> None:
    if recipe.curate is None:
        return
    if recipe.curate == "":
        raise ArgosyError(
            "config.bad-value",
            "no pipeline file is named",
            key=f"{key}.curate",
            value="",
            fix="name a pipeline file, list steps, or leave curate out",
        )
    if task_of(spec).records != "texts":
        raise ArgosyError(
            "config.conflict",
            f"curation judges texts, and the records of this task are {task_of(spec).records}",
            key=f"{key}.curate",
            fix="leave curate out",
        )
    idle = [name for name in ("shuffle", "as_text") if getattr(recipe, name) not in (None, False)]
    if idle:
        raise ArgosyError(
            "config.conflict",
            f"a corpus that is curated cannot have {idle[0]}",
            key=f"{key}.{idle[0]}",
            fix=f"leave {idle[0]} out, or curate to JSON lines with `argosy data curate` and name those in inputs",
        )

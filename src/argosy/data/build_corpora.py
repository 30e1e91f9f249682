"""`argosy data build`: fetch, curate and prepare the corpora of a run spec that do not exist yet.

A corpus directory with a manifest is finished, and nothing else marks work as done. So the command is idempotent. It can be
run by one process or by several that divide the work by worker index (pods of an Indexed Job, tasks of a Slurm array).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from argosy.config.schema import DataSource, PrepareSpec, RunSpec
from argosy.data.chat.chat_template import ChatFormat, format_for
from argosy.data.corpus.corpus_manifest import FILE_NAME, read_manifest
from argosy.data.curate.curate_job import curate
from argosy.data.curate.curate_recipe import is_unfinished, pipeline_of
from argosy.data.curate.curate_work import CurateSharing
from argosy.data.prepare.job import prepare
from argosy.data.prepare.prepare_report import describe
from argosy.data.prepare.work import PrepareOptions
from argosy.data.remote.fetch import FetchOptions, fetch
from argosy.data.remote.hub_tokenizer import fetch_tokenizer
from argosy.data.remote.sources import Choice, text_key
from argosy.data.text.hub_names import on_hub
from argosy.data.text.tokenizer import Tokenizer, load_tokenizer
from argosy.errors import ArgosyError
from argosy.files import local_path
from argosy.tasks.task_registry import task_of

_INDEXES = ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID")
_COUNT = "ARGOSY_WORKERS"


@dataclass(frozen=True)
class Share:
    """The worker index of this process, and the number of workers that divide the work."""

    index: int = 0
    count: int = 1


def share_of(environ: Mapping[str, str]) -> Share:
    """Read the worker index from the variables that Kubernetes and Slurm set, and the number of workers from ARGOSY_WORKERS."""
    found = next((name for name in _INDEXES if name in environ), None)
    if found is None or _COUNT not in environ:
        return Share()
    try:
        share = Share(int(environ[found]), int(environ[_COUNT]))
    except ValueError:
        share = Share(-1, 0)
    if not 0 <= share.index < share.count:
        raise ArgosyError(
            "launch.environment",
            f"{found} is {environ[found]!r} and {_COUNT} is {environ[_COUNT]!r}: the first counts from 0 to one less than the second",
            key=found,
            fix="leave these variables to the launcher, or unset them",
        )
    return share


def build(spec: RunSpec, share: Share, only: str | None = None) -> Iterator[str]:
    """Fetch and prepare the missing corpora. Yield one message per finished piece of work.

    Args:
        spec: The run spec. Each source with a `prepare` section is built.
        share: The worker index of this process.
        only: "fetch" or "prepare" runs that half only; None runs both.
    """
    recipes = [(source, source.prepare) for source in spec.data.sources.values() if source.prepare is not None]
    wanted = on_hub(spec.data.tokenizer)
    # One worker fetches the tokenizer; the others find it in the stage that follows.
    if wanted is not None and only != "prepare" and share.index == 0:
        yield fetch_tokenizer(wanted)
    if not recipes and wanted is not None:
        return
    if not recipes:
        raise ArgosyError(
            "config.missing-key",
            "no corpus of this run spec has a `prepare` section",
            key="data.train.0.prepare",
            fix="data: {train: [{path: corpus, prepare: {fetch: c4, config: en, split: train_small}}]}",
        )
    # Fetching needs no tokenizer, and the volume that it fetches to may still be without one.
    tokenizer = (
        None if only == "fetch" else load_tokenizer(_tokenizer_of(spec), special_in_text=task_of(spec).special_in_text)
    )
    for source, recipe in recipes:
        corpus = local_path(source.path)
        if _is_built(corpus, recipe):
            if tokenizer is not None:
                _require_same_tokenizer(corpus, tokenizer)
            yield f"{corpus}: already exists"
            continue
        if recipe.fetch is not None and only != "prepare":
            yield _fetch(recipe, source, share)
        if tokenizer is not None and recipe.curate is not None:
            yield _curate(spec, recipe, source, corpus, share)
        elif tokenizer is not None:
            chat = format_for(task_of(spec), _tokenizer_of(spec), recipe.chat_template)
            yield _prepare(recipe, source, corpus, tokenizer, chat, share)


def awaits_others(spec: RunSpec) -> bool:
    """Return True if a curation is not finished after `build`: the file system has no locks, and shares of others are missing."""
    recipes = [(source.path, source.prepare) for source in spec.data.sources.values()]
    return any(
        recipe is not None and recipe.curate is not None and not _is_built(local_path(path), recipe)
        for path, recipe in recipes
    )


def _is_built(corpus: Path, recipe: PrepareSpec) -> bool:
    return (corpus / FILE_NAME).exists() and not (recipe.curate is not None and is_unfinished(corpus))


def raw_directory(source: DataSource, recipe: PrepareSpec) -> str:
    """Return the directory of the downloaded files: `prepare.raw`, or the corpus path with `.raw` appended."""
    return recipe.raw or f"{source.path.removeprefix('file://').rstrip('/')}.raw"


def _fetch(recipe: PrepareSpec, source: DataSource, share: Share) -> str:
    choice = Choice(recipe.config, recipe.split, recipe.revision, recipe.sample)
    options = FetchOptions(choice, machine=share.index, machines=share.count)
    return fetch([str(recipe.fetch)], local_path(raw_directory(source, recipe)), options).describe()


def _prepare(
    recipe: PrepareSpec, source: DataSource, corpus: Path, tokenizer: Tokenizer, chat: ChatFormat | None, share: Share
) -> str:
    options = PrepareOptions(
        keys=(_key(recipe) or "text",),
        as_text=recipe.as_text,
        shards=recipe.shards,
        shuffle_seed=recipe.shuffle,
        chat=chat,
        machine=share.index,
        machines=share.count,
    )
    made = prepare(_inputs(recipe, source), tokenizer, corpus, options)
    if made is None:
        return f"{corpus}: the shards of worker {share.index} of {share.count} are done; the last worker to finish writes the manifest"
    return "\n".join(describe(manifest, directory) for directory, manifest in made.items())


def _curate(spec: RunSpec, recipe: PrepareSpec, source: DataSource, corpus: Path, share: Share) -> str:
    pipeline = pipeline_of(
        recipe,
        inputs=_inputs(recipe, source),
        output=str(corpus),
        key=_key(recipe),
        tokenizer=_tokenizer_of(spec),
    )
    report = curate(pipeline, CurateSharing(machine=share.index, machines=share.count))
    if report is None:
        return f"{corpus}: worker {share.index} of {share.count} has done its share; the file system has no locks, so build it again when the others have ended"
    return report.table()


def _inputs(recipe: PrepareSpec, source: DataSource) -> list[str]:
    return recipe.inputs or [raw_directory(source, recipe)]


def _key(recipe: PrepareSpec) -> str | None:
    """Return the key of the text, if the recipe or its data set says it."""
    return recipe.key or (None if recipe.fetch is None else text_key([recipe.fetch]))


def _tokenizer_of(spec: RunSpec) -> str:
    if spec.data.tokenizer is None:
        raise ArgosyError(
            "config.missing-key",
            "a corpus cannot be prepared without a tokenizer",
            key="data.tokenizer",
            fix="data.tokenizer=hf:gpt2 from the Hub, PATH to a tokenizer.json, vocab.json beside merges.txt, or `bytes`",
        )
    return spec.data.tokenizer


def _require_same_tokenizer(corpus: Path, tokenizer: Tokenizer) -> None:
    made_with = read_manifest(corpus).tokenizer.fingerprint
    if made_with != tokenizer.fingerprint:
        raise ArgosyError(
            "tokenizer.mismatch",
            f"{corpus} already exists and was prepared with tokenizer {made_with[:12]}; the run spec names {tokenizer.fingerprint[:12]}",
            key="data.tokenizer",
            fix="choose another path for the corpus, or use the tokenizer it was prepared with",
        )

"""The curation of a corpus in a run spec (`data.train.N.prepare.curate`): a pipeline that ends in tokens.

The steps come from the run spec, or from a pipeline file. The run spec says the rest: inputs, output, tokenizer, key and shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.config.schema import PrepareSpec, RunSpec
from argosy.data.corpus.corpus_manifest import FILE_NAME
from argosy.data.curate.curate_work import REPORT_FILE
from argosy.data.curate.pipeline_spec import Pipeline, make_pipeline, read_pipeline
from argosy.data.prepare.work import PARTS
from argosy.files import local_path


def pipeline_of(recipe: PrepareSpec, *, steps_key: str = "steps", **keys: Any) -> Pipeline:
    """Return the pipeline of a recipe, with these keys in place of those of a pipeline file. Errors name its steps by `steps_key`."""
    named = recipe.model_fields_set
    keys |= {"shards": recipe.shards} if "shards" in named else {}
    if isinstance(recipe.curate, str):
        return read_pipeline(local_path(recipe.curate), **keys)
    given = {key: value for key, value in keys.items() if value is not None}
    return make_pipeline({"steps": recipe.curate} | given, steps_key)


def check_curations(spec: RunSpec) -> None:
    """Refuse steps that are wrong, before a job is started. A pipeline file may be elsewhere, and is checked where it is."""
    for place, source in spec.data.sources.items():
        if source.prepare is not None and isinstance(source.prepare.curate, list):
            steps_key = f"{place}.prepare.curate"
            pipeline_of(source.prepare, steps_key=steps_key, inputs=["inputs"], output=source.path)


def is_unfinished(corpus: Path) -> bool:
    """Return True if a kill came between the manifest and the report of a curation."""
    has_plan = (corpus / PARTS / "plan").exists()
    return has_plan and (corpus / FILE_NAME).exists() and not (corpus / REPORT_FILE).exists()

"""The pipeline file of `argosy data curate`: inputs, output and the steps in order."""

from __future__ import annotations

import difflib
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from argosy.config.yaml_reader import read_yaml
from argosy.data.curate.curation_step import STEPS, CurationStep, step_class
from argosy.errors import ArgosyError

_EXAMPLE = "steps: [{language: {keep: [en]}}, gopher_quality, exact_duplicates]"


class PipelineSpec(BaseModel):
    """The keys of a pipeline file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Files, directories, globs or URLs, as `argosy data prepare` takes them.
    inputs: tuple[str, ...] = Field(min_length=1)
    # The directory to make.
    output: str
    # The key or column that holds the text, and others to keep beside it.
    key: str = "text"
    fields: tuple[str, ...] = ()
    # Whether a file or a line is one document in a .txt file.
    txt_unit: Literal["file", "line"] = "file"
    # With a tokenizer the output is a tokenised corpus, else JSON lines.
    tokenizer: str | None = None
    eod: str | None = None
    append_eod: bool = True
    shards: int = Field(default=1, ge=1)
    # The fraction of records that may be quarantined.
    max_bad: float = Field(default=0.5, ge=0, le=1)
    # How many documents of each reason the report shows.
    examples: int = Field(default=5, ge=0)
    steps: tuple[Any, ...] = ()


class Pipeline(BaseModel):
    """A pipeline file with its steps built."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    spec: PipelineSpec
    # The label of each step, which counts and reports use, and the step.
    steps: tuple[tuple[str, CurationStep], ...]


def read_pipeline(path: Path, **overrides: Any) -> Pipeline:
    """Read a pipeline file. Overrides that are None are ignored."""
    content, _ = read_yaml(path)
    if not isinstance(content, dict):
        raise ArgosyError("config.bad-value", f"{path} is not a mapping of keys", fix=f"inputs, output, {_EXAMPLE}")
    return make_pipeline(content | {key: value for key, value in overrides.items() if value is not None})


def make_pipeline(content: dict[str, Any], steps_key: str = "steps") -> Pipeline:
    """Check the content of a pipeline file, and build its steps. Errors name them by `steps_key`."""
    try:
        spec = PipelineSpec.model_validate(content)
    except ValidationError as error:
        raise _refusal(error, "", list(PipelineSpec.model_fields)) from None
    _check_fields(spec)
    counts: Counter[str] = Counter()
    steps = []
    for number, entry in enumerate(spec.steps):
        name, step = _step(entry, f"{steps_key}.{number}")
        counts[name] += 1
        steps.append((name if counts[name] == 1 else f"{name}_{counts[name]}", step))
    _check_order(steps, steps_key)
    return Pipeline(spec=spec, steps=tuple(steps))


def _step(entry: Any, where: str) -> tuple[str, CurationStep]:
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ArgosyError(
            "config.bad-value", "a step is its name, or its name with its keys", key=where, value=entry, fix=_EXAMPLE
        )
    [(name, keys)] = entry.items()
    if name not in STEPS:
        close = difflib.get_close_matches(str(name), STEPS, n=1)
        fix = f"did you mean {close[0]}?" if close else f"known steps: {', '.join(STEPS)}"
        raise ArgosyError("config.unknown-key", f"there is no step {name}", key=where, value=name, fix=fix)
    found = step_class(name)
    try:
        return name, found.model_validate(keys or {})
    except ValidationError as error:
        raise _refusal(error, f"{where}.{name}.", list(found.model_fields)) from None


def _check_fields(spec: PipelineSpec) -> None:
    """Refuse a field that holds the text as it was before the steps: it would undo masks."""
    for name in spec.fields:
        if name in ("text", spec.key) or spec.key.startswith(f"{name}."):
            raise ArgosyError(
                "config.bad-value",
                f"{name} holds the text, and the output holds the text that the steps left",
                key="fields",
                value=list(spec.fields),
                fix=f"leave {name} out: the text is always written",
            )


def _check_order(steps: list[tuple[str, CurationStep]], key: str) -> None:
    compared: str | None = None
    for label, step in steps:
        if step.compares_documents:
            compared = label
        elif compared is not None:
            raise ArgosyError(
                "config.conflict",
                f"{label} comes after {compared}: if it removed the document that {compared} kept, all copies of it would be lost",
                key=key,
                value=label,
                fix=f"put {label} before {compared}",
            )


def _refusal(error: ValidationError, prefix: str, known: list[str]) -> ArgosyError:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    kinds = {"extra_forbidden": "config.unknown-key", "missing": "config.missing-key"}
    code = kinds.get(first["type"], "config.bad-value")
    close = difflib.get_close_matches(place, known, n=1)
    fix = f"did you mean {prefix}{close[0]}?" if code == "config.unknown-key" and close else f"keys: {', '.join(known)}"
    return ArgosyError(
        code, first["msg"], key=prefix + place, value=None if code == "config.missing-key" else first["input"], fix=fix
    )

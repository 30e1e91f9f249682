"""The reference page of the run spec: every key with its type, default and meaning, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from argosy.config.refusals import section_of
from argosy.config.schema import DERIVED_KEYS, RunSpec


def keys(model: type[BaseModel] = RunSpec, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (dotted key, type, default, description) for every leaf."""
    for name, field in model.model_fields.items():
        key = prefix + name
        section = section_of(field.annotation)
        if section is not None:
            middle = ".0." if get_origin(field.annotation) is list else "."
            yield from keys(section, key + middle)
            continue
        if field.is_required():
            derived = model.__name__ == "ModelSpec" or name in DERIVED_KEYS.get(model.__name__, [])
            default = "(preset or derived)" if derived else "(required)"
        else:
            default = _plain(field.default)
        yield key, _type(field.annotation), default, field.description or ""


def page() -> str:
    rows = "\n".join(
        f"| `{key}` | {kind.replace('|', ' or ')} | {_cell(default)} | {_cell(text)} |"
        for key, kind, default, text in keys()
    )
    return (
        "# The run spec, key by key\n\n"
        "<!-- Made from src/argosy/config/schema.py by `make docs`; edit the descriptions there. -->\n\n"
        "A run spec is a YAML file. Any key can be overridden on the command line as `key.path=value`, unknown keys are\n"
        "errors, and `argosy config show run.yaml` prints every resolved value and where it came from. Relative paths\n"
        "start at the directory the command is run in. Editors can use the JSON Schema of `argosy config schema`.\n\n"
        "Shorthands: `model: gpt2` is `model: {preset: gpt2}`; `data: {train: DIR}` is one corpus; `parallel: auto`\n"
        "leaves the layout to Argosy; `eval: off` turns evaluation off. Durations are written `500ba` (steps; a bare\n"
        "number too), `20B` or `300Mtok` (tokens), `2ep`, `10Ksp` (samples), `30min`, `2h`.\n\n"
        "| key | type | default | meaning |\n| --- | --- | --- | --- |\n" + rows + "\n"
    )


def _cell(text: str) -> str:
    """Escape what would end a cell of a table or begin a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


_PLAIN_TYPES = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true|false",
    "Duration": "duration",
    "Any": "anything",
}


def _type(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is None:
        name = str(annotation.__name__)
        return _PLAIN_TYPES.get(name, name)
    if hasattr(annotation, "__metadata__"):
        return _type(arguments[0])
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)} {_type(arguments[0])}s"
    if str(origin).endswith("Literal"):
        return "|".join(f"`{a}`" for a in arguments)
    return "|".join(_type(a) for a in arguments)


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(f"{v:g}" for v in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)

"""The JSON Schema of a run.yaml, for editors and for the values of the Helm chart."""

from __future__ import annotations

from typing import Any

from argosy.config.schema import DERIVED_KEYS, RunSpec
from argosy.config.units import Duration
from argosy.families.family_registry import ALIASES, PRESETS


def published_schema() -> dict[str, Any]:
    """Return the JSON Schema of a run.yaml as users write it, shorthands included."""
    schema = RunSpec.model_json_schema()
    definitions = schema["$defs"]
    # Users can omit keys that the preset, the family or another key supplies.
    for section, derived in DERIVED_KEYS.items():
        required = definitions[section]["required"]
        definitions[section]["required"] = [key for key in required if key not in derived]
    for section in ("ModelSpec", "MoESpec"):
        definitions[section]["required"] = []
    schema["required"] = [key for key in schema["required"] if key not in ("parallel", "model")]
    schema["anyOf"] = [{"required": ["model"]}, {"required": ["init_from"]}]
    names = sorted([*PRESETS, *ALIASES])
    shorthands: dict[str, Any] = {
        "model": {"enum": names, "description": "a preset"},
        "parallel": {"enum": ["auto", None]},
        "eval": {"enum": ["off", "no", "on", "yes", False, True, None]},
        "guard": {"enum": ["off", "no", "on", "yes", False, True, None]},
        "fault": {"type": "null"},
        "checkpoint": {"type": "null"},
        "log": {"type": "null"},
    }
    for key, shorthand in shorthands.items():
        schema["properties"][key] = {"anyOf": [shorthand, schema["properties"][key]]}
    definitions["ModelSpec"]["properties"]["preset"]["enum"] = [*names, None]
    source = {"$ref": "#/$defs/DataSource"}
    for key, least in (("train", 1), ("validation", 0)):
        definitions["DataSpec"]["properties"][key] = {
            "description": definitions["DataSpec"]["properties"][key]["description"],
            "anyOf": [
                {"type": "string"},
                source,
                {"type": "array", "minItems": least, "items": {"anyOf": [{"type": "string"}, source]}},
            ],
        }
    _also(definitions["DataSpec"], "split", {"type": "string", "pattern": r"^[\d.]+,[\d.]+,[\d.]+$"})
    _also(definitions["ParallelSpec"], "micro_batch", {"enum": ["auto", None]})
    _also(definitions["ClusterSpec"], "storage", {"type": "string", "description": "name of an existing claim"})
    may_be_null = {"DataSpec": ["seq_len"], "OptimSpec": ["min_lr"], "ModelSpec": ["kv_heads", "head_dim", "ffn"]}
    for section, keys in may_be_null.items():
        for key in keys:
            _also(definitions[section], key, {"type": "null"})
    _plain_defaults(schema)
    schema["title"] = "Argosy run spec"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _also(section: dict[str, Any], key: str, shorthand: dict[str, Any]) -> None:
    section["properties"][key] = {"anyOf": [shorthand, section["properties"][key]]}


def _plain_defaults(node: Any) -> None:
    """Write default durations as users do (`500ba`), instead of as an amount and a unit."""
    if isinstance(node, dict):
        default = node.get("default")
        if isinstance(default, dict) and default.keys() == {"amount", "unit"}:
            node["default"] = str(Duration(**default))
        elif isinstance(default, dict):
            # The default of a section: each of its keys has its own default.
            del node["default"]
        for child in node.values():
            _plain_defaults(child)
    elif isinstance(node, list):
        for child in node:
            _plain_defaults(child)

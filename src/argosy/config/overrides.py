"""Overrides of a run spec: `train.steps=100` from the command line, `("train.steps", 100)` from Python."""

from __future__ import annotations

import json
from typing import Any

from argosy.config.refusals import kind_of
from argosy.config.yaml_reader import parse_value
from argosy.errors import ArgosyError

# `key=value`, whose value is parsed as YAML, or (key, value) with a Python value.
Override = str | tuple[str, Any]
# The origins of overridden values.
OVERRIDDEN = ("command line", "override")
# Marks a section that was turned off, as opposed to one that was left empty.
OFF = object()


def read_override(override: Override) -> tuple[str, Any, str]:
    """Return (key, value, origin)."""
    if not isinstance(override, str):
        return override[0], as_yaml(override[1]), "override"
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ArgosyError(
            "config.bad-override",
            f"{override!r} is not an override",
            fix="write key.path=value, for example train.steps=100",
        )
    return key, parse_value(text, f"override {key}"), "command line"


def as_yaml(value: Any) -> Any:
    """Return a Python value as YAML would give it: scalars and arrays of numpy as numbers and lists, a path as text."""
    return json.loads(
        json.dumps(value, default=lambda other: other.tolist() if hasattr(other, "tolist") else str(other))
    )


def set_key(tree: dict[str, Any], key: str, value: Any) -> Any:
    """Set a dotted key of a run spec. Return the section or list that holds it."""
    node: Any = tree
    *parents, last = key.split(".")
    for depth, part in enumerate(parents):
        node = _step_into(node, part, key, ".".join(parents[:depth]))
    node[_index(node, last, key) if isinstance(node, list) else last] = value
    return node


def _step_into(node: Any, part: str, key: str, walked: str) -> Any:
    place: Any = _index(node, part, key) if isinstance(node, list) else part
    if isinstance(node, dict) and node.get(part) in (None, OFF):
        node[part] = {}
    if not isinstance(node[place], dict | list):
        inside = f"{walked}.{part}" if walked else part
        raise ArgosyError(
            "config.bad-override",
            f"{inside} is {kind_of(node[place])}, it has no keys",
            key=key,
            fix=f"set {inside} itself",
        )
    return node[place]


def _index(node: list[Any], part: str, key: str) -> int:
    if part.isdigit() and int(part) < len(node):
        return int(part)
    raise ArgosyError(
        "config.bad-override",
        f"{part!r} is not a position in a list of {len(node)}",
        key=key,
        fix=f"count from 0 to {len(node) - 1}, or set the whole list",
    )

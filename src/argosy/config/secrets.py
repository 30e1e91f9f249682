"""A run spec without its secrets: what is stored, shown and sent about a run.

Secrets belong in the environment (`env:NAME`, or what a library reads by itself). Where a spec holds one all the same, the run uses it, and
only it: every copy of the spec has `***` in its place. That changes no number, so that a resume compares what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from argosy.config.yaml_reader import parse_yaml
from argosy.echo import CUT, address_only, names_secret, redact, redact_address
from argosy.errors import ArgosyError

WEBHOOK = "log.alerts.webhook"  # whoever has the address can post to it
_VARIABLES = "cluster.env."
# Names, paths and addresses: a folder called `disk-0000-…` is no key, and later commands read them from the copy.
_ADDRESSES = ("name", "runs_dir", "init_from", "data.")


def without_secrets(tree: Any, key: str = "") -> Any:
    """A tree of plain values, as `RunSpec.model_dump(mode="json")` gives it, with `***` in place of secrets."""
    if isinstance(tree, dict):
        return {name: without_secrets(value, f"{key}.{name}" if key else str(name)) for name, value in tree.items()}
    if isinstance(tree, list):
        return [without_secrets(value, key) for value in tree]
    if not isinstance(tree, str):
        return tree
    if key == WEBHOOK:
        return address_only(tree)
    if key.startswith(_VARIABLES) and names_secret(key.removeprefix(_VARIABLES)):
        return CUT
    return redact_address(tree) if key.startswith(_ADDRESSES) else redact(tree)


def source_without_secrets(text: str) -> str:
    """The text of a run spec as it was written, with `***` in place of secrets. One whose secrets cannot be found in the text, as they are
    written with escapes or over several lines, is given as plain values instead."""
    try:
        tree = parse_yaml(text, "run.yaml")[0]
    except ArgosyError:
        return redact(text)
    clean = without_secrets(tree)
    shown = redact(text)
    for secret, instead in sorted(_replaced(tree, clean), key=lambda pair: -len(pair[0])):
        shown = shown.replace(secret, instead)
    try:
        if parse_yaml(shown, "run.yaml")[0] == clean:
            return shown
    except ArgosyError:
        pass
    return orjson.dumps(clean, option=orjson.OPT_INDENT_2).decode()


def _replaced(tree: Any, clean: Any) -> Iterator[tuple[str, str]]:
    """(secret value, what stands in its place) of every leaf that differs."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _replaced(value, clean[name])
    elif isinstance(tree, list):
        for value, other in zip(tree, clean, strict=True):
            yield from _replaced(value, other)
    elif tree != clean and tree:
        yield str(tree), str(clean)

"""Redaction of secrets in a run spec before it is stored, shown or sent to a sink.

Secrets belong in the environment (`env:NAME`, or the variables a library reads by itself). If a spec holds a secret anyway, the
run uses it, and every copy of the spec has `***` in its place. Redaction changes no number, so a resume can compare the copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from argosy.config.yaml_reader import parse_yaml
from argosy.echo import CUT, address_only, names_secret, redact, redact_address
from argosy.errors import ArgosyError

# A secret: anyone who knows the address can post to it.
WEBHOOK = "log.alerts.webhook"
_VARIABLES = "cluster.env."
# Names, paths and addresses. Only credentials inside a URL are redacted here: a folder named `disk-0000-…` is not an API key,
# and later commands read these values from the copy.
_ADDRESSES = ("name", "runs_dir", "init_from", "data.")


def without_secrets(tree: Any, key: str = "") -> Any:
    """Return a tree of plain values, such as `RunSpec.model_dump(mode="json")`, with `***` in place of secrets."""
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
    """Return the text of a run spec with `***` in place of secrets.

    If a secret is written with escapes or over several lines, it cannot be found in the text. The result is then JSON of the
    parsed values.
    """
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
    """Yield (secret value, replacement) for every leaf that differs."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _replaced(value, clean[name])
    elif isinstance(tree, list):
        for value, other in zip(tree, clean, strict=True):
            yield from _replaced(value, other)
    elif tree != clean and tree:
        yield str(tree), str(clean)

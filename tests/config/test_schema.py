"""The published JSON Schema accepts what Argosy accepts, and refuses misspelt keys as it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from argosy.config.json_schema import published_schema
from argosy.config.resolve import resolve
from argosy.config.yaml_reader import read_yaml

SCHEMA = published_schema()
VALIDATOR = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))

MINIMAL: dict[str, Any] = {
    "model": "gpt2",
    "data": {"train": "corpus"},
    "train": {"global_batch": 8, "steps": 10},
    "optim": {"lr": 1e-4},
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model": {"preset": "gpt2", "layers": 3, "vocab_multiple": 65_536}},
        {"model": {"family": "gpt", "layers": 1, "hidden": 8, "heads": 2, "vocab_size": "50K", "max_seq_len": 8}},
        {"data": {"train": ["a", {"path": "b", "weight": 0.5}], "split": [98, 2, 0]}},
        {"data": {"train": ["a", {"path": "b"}]}},
        {"train": {"global_batch": 8, "tokens": "20B"}},
        {"parallel": "auto"},
        {"eval": "off"},
        {"eval": {"every": "30min", "batches": 3}},
        {"checkpoint": {"every": "500ba"}},
        {"data": {"train": {"path": "a"}, "split": "98,2,0", "seq_len": None}},
        {"eval": True, "parallel": {"micro_batch": "auto"}, "checkpoint": None},
    ],
)
def test_what_users_write_is_valid(change: dict[str, Any]) -> None:
    VALIDATOR.validate(MINIMAL | change)


@pytest.mark.parametrize(
    "change",
    [
        {"modle": "gpt2"},
        {"model": "gpt5"},
        {"optim": {"lrr": 1}},
        {"train": {"steps": 5}},
        {"eval": "never"},
        {"name": "a/b"},
        {"model": {"preset": "gpt2", "vocab_multiple": 65_537}},
    ],
)
def test_what_is_refused_is_invalid(change: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(MINIMAL | change)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_valid_and_resolve(path: Path) -> None:
    VALIDATOR.validate(read_yaml(path)[0])
    resolve(path, elsewhere=True)


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_only_words_of_json_schema_are_used() -> None:
    def words(node: Any) -> set[str]:
        if isinstance(node, dict):
            inner = [v for k, v in node.items() if k not in ("properties", "$defs")]
            named = [child for k in ("properties", "$defs") for child in node.get(k, {}).values()]
            return set(node) | {w for child in inner + named for w in words(child)}
        return {w for child in node for w in words(child)} if isinstance(node, list) else set()

    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert not words(SCHEMA) & {"ge", "gt", "le", "lt", "amount", "unit"}

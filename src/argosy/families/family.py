"""The declaration of a model family: its structure, its presets, and its format in Hugging Face's files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from argosy.config.model import ModelSpec
from argosy.families.architecture import LayerPlan, plan_layers
from argosy.families.hf_keys import Keys
from argosy.families.weight_table import Entry

# Keys of a model spec.
Row = dict[str, Any]
# Keys of a config.json.
Tree = dict[str, Any]


@dataclass(frozen=True)
class HfFormat:
    """The reader and writer of the config.json of one `model_type`."""

    read: Callable[[Keys], Row]
    write: Callable[[ModelSpec], Tree]


@dataclass(frozen=True)
class StoredNames:
    """The tensor names a file may have besides the table's: copies of tied weights, names of older versions, buffers.

    `prefix` is missing from the names if the model was saved without its head. `copies` are tensors that must equal another;
    we never write them. `unused` matches tensors that a model does not need. `left_out` are stored only if they differ from
    another. `renamed` maps patterns of older names to new ones.
    """

    prefix: str = ""
    copies: dict[str, str] = field(default_factory=dict)
    unused: str = r"(?!)"
    left_out: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def name_of(self, stored: str, known: Collection[str]) -> str:
        """Return the table's name for a tensor of a file."""
        for pattern, name in self.renamed.items():
            stored = re.sub(pattern, name, stored)
        return f"{self.prefix}{stored}" if stored not in known and f"{self.prefix}{stored}" in known else stored

    def may_lack(self, name: str) -> bool:
        return re.search(self.unused, name) is not None


@dataclass(frozen=True)
class Family:
    """One model family. `argosy.families.family_registry` lists them all.

    `defaults` are the structural keys of a model spec, `presets` its named sizes. `formats` has a reader and writer for each
    Hugging Face `model_type` the family covers, and `model_type` returns the one that describes a given model. `table` lists
    where each of our parameters is in their files. `plan` describes every layer, those of all stacks in order.
    """

    name: str
    defaults: Row
    presets: dict[str, Row]
    formats: dict[str, HfFormat]
    model_type: Callable[[ModelSpec], str]
    table: Callable[[ModelSpec], Iterator[Entry]]
    stored: StoredNames = StoredNames()
    plan: Callable[[ModelSpec], tuple[LayerPlan, ...]] = plan_layers

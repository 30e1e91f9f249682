"""The registry of model families and of their presets.

A preset's name is what people call a model, not its size. `argosy.config.counts` computes sizes from the rows (Azure's "375m"
example has 65 M parameters, and `argosy config models` says so).
"""

from __future__ import annotations

from argosy.config.model import ModelSpec
from argosy.families.architecture import LayerPlan
from argosy.families.bert import BERT
from argosy.families.family import Family, Row
from argosy.families.gemma3 import GEMMA3
from argosy.families.gpt import GPT
from argosy.families.llama import LLAMA
from argosy.families.mpt import MPT
from argosy.families.t5 import T5

FAMILIES: dict[str, Family] = {family.name: family for family in (GPT, MPT, LLAMA, GEMMA3, BERT, T5)}
PRESETS: dict[str, Row] = {name: row for family in FAMILIES.values() for name, row in family.presets.items()}

# The bare labels of the two cloud examples, so that their commands work unchanged.
ALIASES: dict[str, str] = {
    label: f"gpt3-{label}"
    for label in (
        "125m", "375m", "857m", "1.3b", "13b", "30b", "175b",
        "1.7b", "3.6b", "7.5b", "18.4b", "39.1b", "76.1b", "145.6b", "310.1b",
    )
}  # fmt: skip


def family_of(spec: ModelSpec) -> Family:
    return FAMILIES[spec.family]


def plan_of(spec: ModelSpec) -> tuple[LayerPlan, ...]:
    """Return the layer plan of a model, the layers of all its stacks in order."""
    return family_of(spec).plan(spec)

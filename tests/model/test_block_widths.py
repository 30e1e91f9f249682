"""The widths by which fp8 is planned and refused are those of the linear layers that are built."""

from __future__ import annotations

import pytest

from argosy.config.fp8_rules import block_widths, has_fp8_layers
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve_model
from argosy.errors import ArgosyError
from argosy.families.family_registry import PRESETS
from argosy.model.build import build_model
from argosy.model.layers import Linear
from argosy.parallel.precision import apply_fp8

# One preset of each family, and shapes that a family has besides.
PRESET_OF = {str(row["family"]): name for name, row in PRESETS.items()}
SHAPES = [[name] for name in PRESET_OF.values()]
SHAPES += [["gpt2", "hidden=40", "heads=2"], ["gpt2", "hidden=32", "heads=2", "ffn=40"], ["llama3-1b", "kv_heads=4"]]
SHAPES += [["deepseek-moe-16b", "moe.shared_experts=0", "moe.dense_layers=0"]]


def built(shape: list[str]) -> tuple[ModelSpec, list[Linear]]:
    spec = resolve_model(shape[0], ["layers=2", *shape[1:]])
    model = build_model(spec, "meta")
    return spec, [m for name, m in model.named_modules() if isinstance(m, Linear) and "layers" in name.split(".")]


@pytest.mark.parametrize("shape", SHAPES, ids=" ".join)
def test_the_widths_of_a_model_are_those_of_its_layers(shape: list[str]) -> None:
    spec, layers = built(shape)
    assert {(layer.in_features, layer.out_features) for layer in layers} == block_widths(spec)


def test_a_model_is_refused_when_it_is_built_as_it_is_when_it_is_planned() -> None:
    # 32 x 96 and 32 x 32 of the attention are multiples of 16, beside an MLP of 40.
    mixed = resolve_model("gpt2", ["layers=1", "hidden=32", "heads=2", "ffn=40"])
    assert has_fp8_layers(mixed)
    apply_fp8(build_model(mixed, "meta"))
    narrow = resolve_model("gpt2", ["layers=1", "hidden=40", "heads=2"])
    assert not has_fp8_layers(narrow)
    with pytest.raises(ArgosyError, match="no linear layer in the blocks has that: their sizes are 40, 120, 160"):
        apply_fp8(build_model(narrow, "meta"))

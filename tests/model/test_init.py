"""Initial weights depend on the seed and the parameter's name, and on nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from argosy.config.resolve import resolve_model
from argosy.model.build import build_model, fill_like_initial, initial_value, initialise

SIZES = ["hidden=64", "heads=4", "vocab_size=500", "max_seq_len=32"]


def weights(seed: int = 1, *changes: str) -> dict[str, torch.Tensor]:
    spec = resolve_model("gpt2", [*SIZES, "layers=3", *changes])
    model = build_model(spec)
    initialise(model, spec, seed)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_the_same_name_gets_the_same_value_in_a_model_of_other_depth() -> None:
    torch.manual_seed(123)  # whatever was drawn before does not matter
    shallow = weights(1)
    torch.rand(1000)
    deep = weights(1, "layers=5")
    residual = ("attn.out.weight", "mlp.down.weight")  # scaled by depth, by design
    for name in shallow:
        if not name.endswith(residual):
            assert torch.equal(shallow[name], deep[name])


def test_seeds_and_names_give_different_values() -> None:
    first, second = weights(1), weights(2)
    assert not torch.equal(first["embed.tokens.weight"], second["embed.tokens.weight"])
    assert not torch.equal(first["layers.0.attn.qkv.weight"], first["layers.1.attn.qkv.weight"])


def test_the_scales_are_those_of_gpt2() -> None:
    found = weights(3)
    assert float(found["embed.tokens.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(found["layers.0.mlp.down.weight"].std()) == pytest.approx(0.02 / math.sqrt(6), rel=0.05)
    assert bool((found["layers.0.attn_norm.weight"] == 1).all())
    assert bool((found["layers.0.attn.qkv.bias"] == 0).all())


@pytest.mark.parametrize("preset", ["gpt2", "t5-small", "gemma3-1b"])
@pytest.mark.parametrize(
    ("name", "constant"), [("scale", None), ("bias", 0.0), ("norm.bias", 0.0), ("norm.weight", 1.0)]
)
def test_a_parameter_starts_by_its_name_inside_a_module_or_outside(
    preset: str, name: str, constant: float | None
) -> None:
    spec = resolve_model(preset)
    measured = torch.full((8, 16), -5.0)
    fill_like_initial(name, measured, spec)
    for value in (measured, initial_value(name, torch.Size((8, 16)), spec, seed=1)):
        expected = spec.norm_start if constant == 1.0 else constant
        if expected is None:
            assert 0 < float(value.std()) < 2
        else:
            assert bool((value == expected).all())


@pytest.mark.parametrize("preset", ["t5-small", "t5-v1.1-small"])
def test_a_fresh_t5_guesses_evenly_with_a_head_of_its_own_or_without(preset: str) -> None:
    """What it is trained from: a loss a little above that of saying every token is as likely as another."""
    spec = resolve_model(preset, [*SIZES, "layers=2", "decoder_layers=2", "dropout=0"])
    model = build_model(spec)
    initialise(model, spec, seed=1)
    tokens = torch.randint(0, 500, (4, 16), generator=torch.Generator().manual_seed(0))
    logits = model(tokens, decoder_tokens=tokens.flip(1))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert float(loss.detach()) == pytest.approx(math.log(500), abs=1.0)

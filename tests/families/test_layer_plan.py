"""The layer plan decides what each layer's attention sees, and everything that counts or builds layers follows it."""

from __future__ import annotations

import pytest
import torch

from argosy.config.counts import layer_flops, layer_keys, training_flops_per_token
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve_model
from argosy.errors import ArgosyError
from argosy.families.family_registry import PRESETS, plan_of
from argosy.model.build import build_model, initialise

SMALL = ["layers=6", "hidden=48", "heads=6", "kv_heads=2", "ffn=80", "vocab_size=101", "max_seq_len=40"]


def interleaved(*more: str) -> ModelSpec:
    return resolve_model("mistral-7b", [*SMALL, "window=4", "global_every=3", "local_rope_theta=50", *more])


def test_every_so_many_layers_one_is_global_with_its_own_rotary_base() -> None:
    plan = plan_of(interleaved("rope_scaling={kind: linear, factor: 8}"))
    assert [layer.attention.window for layer in plan] == [4, 4, None, 4, 4, None]
    assert [layer.attention.rope_theta for layer in plan] == [50, 50, 10_000, 50, 50, 10_000]
    assert [layer.attention.rope_scaling is None for layer in plan] == [True, True, False, True, True, False]


@pytest.mark.parametrize("preset", [name for name in PRESETS if resolve_model(name).global_every is None])
def test_layers_that_are_alike_share_one_attention_context(preset: str) -> None:
    assert len({layer.attention for layer in plan_of(resolve_model(preset))}) == 1


def test_a_token_beyond_the_window_is_seen_through_global_layers_alone() -> None:
    """With windows of 4 in 6 layers, token 0 reaches no further than token 18; a global layer carries it everywhere."""
    tokens = torch.randint(0, 101, (1, 40), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 0] = (tokens[0, 0] + 1) % 101
    for spec, far in ((interleaved(), True), (interleaved("global_every=7"), False)):
        model = build_model(spec).eval()
        initialise(model, spec, 1)
        with torch.no_grad():
            moved = (model(tokens) - model(other)).abs().amax(-1)[0]
        assert (moved[19:] > 0).all() == far
        assert (moved[:19] > 0).all()


def test_flops_are_counted_by_the_window_of_each_layer() -> None:
    spec, seq = interleaved(), 40
    keys = layer_keys(spec, seq)
    assert keys[2] == seq / 2
    assert keys[0] == 4 - 16 / (2 * seq)
    layers, _ = layer_flops(spec, seq)
    assert layers[2] - layers[0] == pytest.approx(seq * 4 * spec.heads * spec.head_dim * (keys[2] - keys[0]))
    alike = resolve_model("mistral-7b", [*SMALL, "window=4"])
    assert training_flops_per_token(spec, seq) > training_flops_per_token(alike, seq)


def test_the_scale_of_the_scores_can_be_set() -> None:
    plain, same, other = (interleaved(*keys) for keys in ([], ["query_pre_attn_scalar=8"], ["query_pre_attn_scalar=2"]))
    assert plain.head_dim == 8
    tokens = torch.randint(0, 101, (1, 20), generator=torch.Generator().manual_seed(0))
    logits = []
    for spec in (plain, same, other):
        model = build_model(spec).eval()
        initialise(model, spec, 1)
        logits.append(model(tokens))
    torch.testing.assert_close(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 1e-6


@pytest.mark.parametrize("key", ["global_every=3", "local_rope_theta=50"])
def test_keys_of_windows_without_a_window_are_refused(key: str) -> None:
    with pytest.raises(ArgosyError, match=r"is for layers with a window"):
        resolve_model("llama2-7b", [key])

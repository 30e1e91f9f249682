"""Where a model is spread, every process drops what one process would drop there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.resolve import resolve_model
from argosy.config.seeds import derive_seed
from argosy.model.attention import Mask, prepare_attention
from argosy.model.build import build_model
from argosy.model.sharding import WHOLE, Dropout, Noise, Share, drop
from argosy.parallel.transformer_blocks import DropoutSeeds, named_blocks


@pytest.mark.parametrize("share", [Share((1,), 2), Share((0, 3), 4), Share((2,), 4)])
def test_a_share_of_the_sequence_drops_what_one_process_drops_there(share: Share) -> None:
    x = torch.randn(2, 8, 3)
    layer = Dropout(0.3)
    torch.manual_seed(1)
    whole = layer(x)
    layer.share = share
    torch.manual_seed(1)
    assert torch.equal(layer(share.take(x, 1)), share.take(whole, 1))
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(causal=False, window=3)])
def test_a_share_of_the_heads_drops_what_one_process_drops_there(mask: Mask) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 8, 4) for heads in (4, 2, 2))
    torch.manual_seed(1)
    whole = prepare_attention(mask, q, 8, 4, dropout=0.3)(q, k, v)
    share = Share((1,), 2)
    torch.manual_seed(1)
    part = prepare_attention(mask, q, 8, 4, dropout=0.3, heads=share)(*(share.take(t, 1) for t in (q, k, v)))
    torch.testing.assert_close(part, share.take(whole, 1))


def test_dropout_of_the_whole_is_torch_s_own() -> None:
    x = torch.randn(2, 8, 3)
    torch.manual_seed(1)
    expected = torch.nn.functional.dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(drop(x, 0.5, {1: WHOLE}), expected)


@given(st.data())
def test_a_share_of_a_share_is_taken_in_two_steps_or_in_one(data: st.DataObject) -> None:
    def share() -> Share:
        of = data.draw(st.integers(1, 4))
        return Share(tuple(data.draw(st.permutations(range(of)))[: data.draw(st.integers(1, of))]), of)

    outer, inner = share(), share()
    size = outer.of * inner.of * data.draw(st.integers(1, 3))
    whole = torch.arange(size)
    both = inner.inside(outer)
    assert torch.equal(both.take(whole, 0), inner.take(outer.take(whole, 0), 0))
    assert both.size_of_whole(len(both.take(whole, 0))) == size


def test_seeding_a_micro_batch_is_torch_s_own_and_leaves_nothing_behind() -> None:
    """For devices that are not in use, torch.manual_seed stores every seed with a stack: memory that grows with the steps."""
    stored = len(torch.cuda._queued_calls)
    layer = Dropout(0.5)
    seeds = DropoutSeeds(layer, 7)
    seeds.begin(3, 1)
    drawn = torch.rand(4)
    assert len(torch.cuda._queued_calls) == stored
    torch.manual_seed(derive_seed(7, "dropout", 3, 1))
    assert torch.equal(drawn, torch.rand(4))


def test_generators_of_a_cuda_graph_have_the_seeds_that_blocks_get() -> None:
    """A graph does not run the hooks that seed the blocks."""
    sizes = {"layers": 2, "hidden": 8, "heads": 1, "vocab_size": 16, "max_seq_len": 4}
    spec = resolve_model({"family": "gpt", "dropout": 0.5, **sizes})
    model, found = build_model(spec), []
    seeds = DropoutSeeds(model, 7)
    for _, block in named_blocks(model):
        block.register_forward_pre_hook(lambda block, inputs: found.append(torch.initial_seed()))
    for micro in range(2):
        seeds.begin(3, micro)
        generators = seeds.captured(torch.device("cpu"))
        model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
        assert [generator.initial_seed() for generator in generators] == found
        found.clear()


def test_embedding_noise_is_bounded_and_for_training_only() -> None:
    noise, x = Noise(5.0), torch.zeros(2, 16, 8)
    found = noise(x)
    bound = 5.0 / (16 * 8) ** 0.5
    assert 0.9 * bound < float(found.abs().max()) <= bound
    assert torch.equal(noise.eval()(x), x)
    # A rank with a share of the sequence adds its part of the same noise.
    noise.train()
    torch.manual_seed(3)
    whole = noise(x)
    noise.share = Share((1,), 2)
    torch.manual_seed(3)
    assert torch.equal(noise(x[:, 8:]), whole[:, 8:])

"""Collectives are launched while the pass they belong to runs: `argosy train --profile` shows it from the trace of real ranks."""

from __future__ import annotations

import numpy as np
import pytest

from dist.pool import Pool
from dist.profiles import profile_steps
from dist.test_matrix import sized
from dist.training import Trace, spec_of, train_after, train_early, train_steps


@pytest.mark.parametrize(
    ("layout", "axis"),
    [("dp_replicate=2", "dp_replicate"), ("dp_shard=2", "dp_shard"), ("tp=2", "tp"), ("pp=2", "pp"), ("cp=2", "cp")],
)
def test_a_profile_tells_exposed_communication_by_axis(pool: Pool, layout: str, axis: str) -> None:
    first, second = pool.run(2, profile_steps, "llama", f"{layout} micro_batch=8")
    for rank in (first, second):
        assert rank.exposure.axes.keys() == {axis}
        time = rank.exposure.axes[axis]
        assert 0 < time.exposed <= time.busy
        assert time.calls >= 2
        assert 0 < rank.exposure.share < 1
        # The counts and the results of a step belong to no pass.
        assert rank.exposure.in_pass >= 0.9 * (rank.exposure.in_pass + rank.exposure.late) > 0
        assert rank.exposure.host_waits == 0
    assert any("exposed communication" in line for line in first.lines)
    assert any(line.strip().startswith(axis) for line in first.lines)
    # The first rank speaks for all.
    assert second.lines == []


def test_a_shard_is_gathered_before_the_pass_that_needs_it_begins(pool: Pool) -> None:
    """In both passes: of the two blocks, the first computes while the second is gathered, and the other way round."""
    for rank in pool.run(2, profile_steps, "llama", "dp_shard=2 micro_batch=8 model.layers=2"):
        began = rank.began
        assert began["FSDP::all_gather (layers.1)"] < began["FSDP::pre_forward (layers.1)"]
        assert began["FSDP::backward_prefetch for layers.0"] < began["FSDP::pre_backward (layers.0)"]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        # Tied weights, and gradients that are copied back from bf16.
        ("gpt", "dp_replicate=2 reduce=bf16"),
        ("moe", "dp_replicate=2 cp=2 recompute=full"),
        # A rank's stages share a weight, and weight gradients come later than others.
        ("gpt", "pp=2 dp_replicate=2 schedule=zbv"),
        ("mpt", "pp=2 dp_replicate=2 schedule=interleaved-1f1b"),
        ("lora", "dp_replicate=2 tp=2"),
    ],
)
def test_sums_beside_the_backward_pass_have_the_bits_of_sums_after_it(pool: Pool, model: str, layout: str) -> None:
    ranks = spec_of(model, layout).parallel.world_size
    beside = pool.run(ranks, train_steps, model, sized(layout), 2)
    after = pool.run(ranks, train_after, model, sized(layout), 2)
    require_same_bits(beside, after)


@pytest.mark.parametrize(
    ("model", "layout", "each"),
    # Attention and MLP of two layers in two micro-batches of two steps; with experts or adapters only what one matmul reads.
    [("llama", "tp=2", 16), ("mpt", "tp=2 sp=false recompute=full", 16), ("moe", "tp=2", 8), ("lora", "tp=2", 0)],
)
def test_tensor_parallel_sums_beside_weight_gradients_have_the_same_bits(
    pool: Pool, model: str, layout: str, each: int
) -> None:
    early = pool.run(2, train_early, model, sized(layout), 2, True)
    late = pool.run(2, train_early, model, sized(layout), 2, False)
    assert [count for _, count in early] == [each, each]
    require_same_bits([trace for trace, _ in early], [trace for trace, _ in late])


def require_same_bits(first: list[Trace], second: list[Trace]) -> None:
    for one, other in zip(first, second, strict=True):
        assert (one.losses, one.norms) == (other.losses, other.norms)
        assert all(np.array_equal(one.weights[name], other.weights[name]) for name in one.weights)

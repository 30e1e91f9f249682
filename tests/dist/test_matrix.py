"""Every layout computes the numbers of one process: loss and gradient norm at every step, and every weight after the last."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from argosy.families.adapter_sizes import is_adapter
from dist.norms import spread_norm
from dist.pool import KEEPS_MESHES, Pool, gloo_threads
from dist.training import (
    DECODERS,
    ENCODERS,
    Trace,
    gradients_between,
    kept_dtypes,
    spec_of,
    train_broken,
    train_compiled,
    train_steps,
)

# The second step begins with what the first left: weights, moments, biases of experts, gradients that were to be cleared. Every planted
# bug shows by then. The model with experts, which has whatever the others have, goes on for longer on the layouts all models try.
STEPS, MORE_STEPS = 2, 4
LAYOUTS = [  # one line each: keys of `parallel`; the batch is 16
    "dp_replicate=2",
    "dp_shard=2",
    "dp_replicate=2 dp_shard=2",
    "cp=2",
    "pp=2",
    "pp=2 schedule=zbv",
    "pp=2 dp_shard=2",
    "tp=2",
    "dp_shard=2 tp=2",
]
ENCODER_LAYOUTS = ["dp_shard=2", "tp=2", "tp=2 sp=false", "dp_shard=2 tp=2 recompute=full"]
ENCODER_PIPELINES = ["pp=2", "pp=4 model.dropout=0.1"]  # two towers are none
ONE_MODEL = {  # what is no matter of the model is tried on one
    "dp_replicate=2 micro_batch=8": "mpt",
    "dp_replicate=4": "llama",
    "dp_shard=2 micro_batch=8": "moe",
    "dp_shard=4": "gpt",
    "dp_shard=4 reshard=false recompute=full micro_batch=2": "llama",
    "dp_replicate=2 dp_shard=2 micro_batch=2": "moe",
    "cp=4 cp_kind=ulysses": "gpt",
    "pp=4": "gpt",
    "tp=2 sp=false": "moe",
    "dp_replicate=2 model.dropout=0.1": "gpt",
    "dp_shard=4 model.dropout=0.1": "gpt",
    "cp=2 model.dropout=0.1": "gpt",
    "cp=4": "mpt",
    "cp=2 dp_shard=2": "gpt",
    "cp=2 cp_kind=ulysses model.dropout=0.1 recompute=full": "gpt",
    "cp=2 recompute=selective": "llama",
    "cp=2 dp_replicate=2": "packed",
    "cp=2 dp_shard=2 cp_kind=ulysses": "packed",
    "cp=2 cp_kind=ulysses dp_shard=2 recompute=selective": "moe",
    "cp=2 dp_replicate=2 dp_shard=2": "moe",
    "cp=4 dp_replicate=2 cp_kind=ulysses": "packed",
    "pp=2 schedule=gpipe model.dropout=0.1": "gpt",
    "pp=2 micro_batch=16": "gpt",
    "pp=4 schedule=gpipe": "moe",
    "pp=2 schedule=interleaved-1f1b": "gpt",
    "pp=2 schedule=dualpipev": "moe",
    "pp=2 schedule=zbv model.dropout=0.1 recompute=full": "gpt",
    "pp=2 schedule=zbv recompute=selective": "llama",
    "pp=4 schedule=interleaved-1f1b model.layers=8": "gpt",
    "pp=4 schedule=zbv model.layers=8 micro_batch=2": "llama",
    "pp=4 schedule=dualpipev model.layers=8 micro_batch=2": "mpt",
    "pp=2 dp_replicate=2 schedule=interleaved-1f1b": "mpt",
    "pp=2 dp_shard=2 schedule=interleaved-1f1b reshard=true": "gpt",
    "pp=2 dp_shard=2 schedule=dualpipev micro_batch=2": "moe",
    "pp=2 dp_shard=2 schedule=zbv recompute=full": "gpt",
    "pp=2 dp_replicate=2 dp_shard=2": "gpt",
    "pp=2 tp=2": "gpt",
    "pp=2 tp=2 schedule=zbv sp=false": "mpt",
    "pp=2 dp_shard=2 schedule=interleaved-1f1b model.tied=true": "t5",
    "pp=2 cp=2": "packed",
    "pp=2 cp=2 cp_kind=ulysses schedule=zbv": "moe",
    "tp=4 train.z_loss=0.1": "gpt",
    "tp=4 sp=false model.qk_norm=true": "llama",
    "tp=2 model.qk_norm=true model.kv_heads=2": "llama",
    "dp_replicate=2 tp=2": "moe",
    "dp_replicate=2 dp_shard=2 tp=2": "moe",
    "dp_shard=4 tp=2 recompute=selective": "mpt",
    "tp=2 model.moe.shared_experts=1 model.moe.shared_gate=true": "moe",
    "tp=2 model.dropout=0.1": "gpt",
    "tp=2 sp=false model.dropout=0.1 recompute=full": "mpt",
    "dp_shard=2 tp=2 model.dropout=0.1 micro_batch=2": "t5",
    "cp=2 tp=2 model.dropout=0.1": "gpt",
    "cp=2 cp_kind=ulysses tp=2": "mpt",
    "dp_shard=2 cp=2 tp=2": "moe",
    "dp_shard=2 ep=2": "moe",
    "dp_shard=2 ep=2 recompute=selective": "moe",
    "dp_shard=4 ep=2": "moe",
    "dp_shard=8 ep=4 recompute=full micro_batch=2": "moe",
    "cp=2 ep=2": "moe",
    "dp_replicate=2 dp_shard=2 ep=2": "moe",
    "dp_replicate=2 dp_shard=4 ep=2 reshard=false micro_batch=1": "moe",
    "dp_shard=2 cp=2 ep=4 model.moe.shared_experts=1": "moe",
    "dp_shard=2 cp=2 cp_kind=ulysses ep=2 recompute=selective": "moe",
    "dp_shard=2 tp=2 ep=2": "moe",
    "dp_shard=4 tp=2 ep=2 model.moe.experts=2": "moe",
    "pp=2 dp_shard=2 ep=2 schedule=zbv": "moe",
    "pp=2 dp_shard=2 tp=2 ep=2": "moe",
    "pp=2 dp_shard=2 cp=2 ep=4 recompute=full": "moe",
    "pp=2 tp=2 schedule=zbv": "moe",
    "pp=2 tp=2 micro_batch=4": "t5",
    "pp=2 tp=2 sp=false": "bert",
    "pp=2 dp_shard=2 tp=2 model.dropout=0.1": "gpt",
    "tp=2 dp_shard=2 recompute=selective": "gemma",
    "cp=2 dp_replicate=2 recompute=full": "prefix",
    "cp=2 cp_kind=ulysses recompute=selective": "prefix",
    "pp=2 tp=2 recompute=full": "prefix",
    "pp=2 schedule=interleaved-1f1b micro_batch=4": "gemma",
    "cp=2 recompute=full": "gemma",
    "cp=2 cp_kind=ulysses tp=2 recompute=full": "gemma",
    "pp=2 cp=2 tp=2": "llama",
    "dp_shard=2 tp=2 cp=2": "sft",
    "pp=2 dp_replicate=2": "sft",
    "dp_replicate=2 tp=2 cp=2 model.embed_noise=5": "sft",
    "dp_shard=2 tp=2 micro_batch=2": "dpo",
    "pp=2 dp_replicate=2 micro_batch=2": "dpo",
    "dp_shard=2 tp=2 recompute=full micro_batch=2": "lora",
    "pp=2 tp=2 schedule=zbv recompute=selective": "lora",
    "dp_replicate=2 dp_shard=2 cp=2 tp=2 sp=false": "lora",
    "tp=2 recompute=selective": "dora",
    "dp_shard=2 recompute=full": "dora",
}
CASES = [
    *((model, layout) for layout in LAYOUTS for model in DECODERS),
    *((model, layout) for layout in ENCODER_LAYOUTS for model in ENCODERS),
    *((model, layout) for layout in ENCODER_PIPELINES for model in ("bert", "t5")),
    *((model, layout) for layout, model in ONE_MODEL.items()),
]


@cache
def reference(model: str, keys: str, steps: int) -> Trace:
    return train_steps(model, keys, steps)


def sized(layout: str) -> str:
    """With as few micro-batches, and layers where no stage needs one, as show what more would: a case's time is theirs.

    Of 16 samples, each of two data-parallel ranks takes two micro-batches, and so does a rank that takes all. A pipeline needs more."""
    if "micro_batch=" not in layout:
        layout += " micro_batch=4" if "pp=" in layout or "dp_" in layout else " micro_batch=8"
    return layout if "pp=" in layout or "model.layers=" in layout else f"{layout} model.layers=2"


def of_one_process(layout: str) -> str:
    """The keys of the one process whose numbers those of the ranks are compared with: all but those of the layout itself."""
    return " ".join(key for key in sized(layout).split() if "." in key or key.startswith("micro_batch"))


def run(
    pool: Pool, model: str, layout: str, how: Callable[..., Trace] = train_steps, *more: str, steps: int = STEPS
) -> list[Trace]:
    ranks = spec_of(model, layout).parallel.world_size
    traces: list[Trace] = pool.run(ranks, how, model, sized(layout), steps, *more)
    return traces


def require_equal(model: str, layout: str, traces: list[Trace]) -> None:
    """Every rank's numbers are those of one process with the same micro-batches, and without padding of the vocabulary."""
    expected = reference(model, f"{of_one_process(layout)} model.vocab_multiple=1", len(traces[0].losses))
    for trace in traces:
        np.testing.assert_allclose(trace.losses, expected.losses, rtol=1e-5)
        np.testing.assert_allclose(trace.norms, expected.norms, rtol=1e-4)
        for name, weight in trace.weights.items():
            np.testing.assert_allclose(weight, expected.weights[name], rtol=1e-4, atol=1e-4, err_msg=name)
    assert {name for trace in traces for name in trace.weights} == expected.weights.keys()


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_norm_of_what_is_spread_is_that_of_64_bit_sums_over_the_whole(pool: Pool, ranks: int) -> None:
    for found, expected in pool.run(ranks, spread_norm, ranks):
        assert found == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_layout_computes_what_one_process_does(pool: Pool, model: str, layout: str) -> None:
    steps = MORE_STEPS if model == "moe" and layout in LAYOUTS else STEPS
    require_equal(model, layout, run(pool, model, layout, steps=steps))


@pytest.mark.skipif(KEEPS_MESHES, reason="torch 2.11 keeps the groups of DTensors itself")
@pytest.mark.parametrize("layout", ["dp_replicate=2", "cp=2", "pp=2 dp_shard=2", "dp_shard=2 tp=2"])
def test_an_engine_that_is_dropped_takes_its_groups_with_it(pool: Pool, layout: str) -> None:
    """Nothing out of the garbage collector's sight holds it: hooks of parameters are."""
    run(pool, "gpt", layout)
    assert pool.run(1, gloo_threads) == [0]


@pytest.mark.parametrize(
    ("layout", "after"),
    [
        *((layout, 1) for layout in ("dp_shard=2", "dp_shard=2 cp=2", "dp_shard=2 tp=2", "dp_shard=2 reshard=false")),
        # Copies sum their shards once; until then torch keeps them elsewhere.
        ("dp_replicate=2 dp_shard=2 micro_batch=2", 0),
        ("dp_replicate=2 dp_shard=2 micro_batch=2 reduce=bf16", 0),
    ],
)
def test_between_micro_batches_a_rank_has_no_gradients_but_its_shards(pool: Pool, layout: str, after: int) -> None:
    """What is not reduced would take the memory of the whole model."""
    ranks = spec_of("gpt", layout).parallel.world_size
    for held in pool.run(ranks, gradients_between, "gpt", f"{sized(layout)} train.precision=bf16"):
        assert held == [(0, True), (after, True)]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_a_pipeline_sums_the_gradients_of_its_shards_in_32_bits(pool: Pool, schedule: str) -> None:
    """Also those that are computed apart from the passes."""
    layout = f"pp=2 dp_shard=2 schedule={schedule} micro_batch=2 model.layers=4 train.precision=bf16"
    assert pool.run(4, kept_dtypes, "llama", layout) == [{"torch.float32"}] * 4


@pytest.mark.parametrize(
    "layout",
    [
        "dp_replicate=2", "dp_shard=2", "dp_shard=2 reshard=false", "dp_shard=2 tp=2", "pp=2 dp_shard=2 model.layers=2",
        "pp=2 dp_shard=2 schedule=zbv micro_batch=4 model.layers=4",
    ],
)  # fmt: skip
def test_an_evaluation_changes_no_bit_of_the_steps_after_it(pool: Pool, layout: str) -> None:
    """A run that resumes after the evaluation has not made it."""
    layout = f"{layout} train.precision=bf16"
    ranks = spec_of("llama", layout).parallel.world_size
    without, evaluated = (pool.run(ranks, train_steps, "llama", layout, 3, evaluates) for evaluates in ((), (1, 2, 3)))
    for plain, other in zip(without, evaluated, strict=True):
        assert plain.losses == other.losses
        assert plain.norms == other.norms
        assert all(np.array_equal(weight, other.weights[name]) for name, weight in plain.weights.items())


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("gpt", layout) for layout in ("dp_shard=2", "dp_replicate=2 dp_shard=2", "tp=2", "dp_shard=2 tp=2")),
        ("moe", "dp_shard=4 ep=2"),
    ],
)
def test_muon_orthogonalises_whole_matrices(pool: Pool, model: str, layout: str) -> None:
    """In bf16, so that the last bits of its gradients matter: the bounds are wider, and far below what shards would give; and only a
    few steps, before those bits send a token to another expert, as on some processors they do."""
    expected = reference(model, sized("optim.name=muon micro_batch=4"), steps=3)
    for trace in run(pool, model, f"{layout} optim.name=muon", steps=3):
        np.testing.assert_allclose(trace.losses, expected.losses, rtol=5e-5)
        for name, weight in expected.weights.items():
            np.testing.assert_allclose(trace.weights[name], weight, atol=1e-3, err_msg=name)


def test_shards_of_frozen_weights_have_the_training_precision(pool: Pool) -> None:
    """Adapters beside them have 32-bit master weights."""
    expected = reference("lora", sized("train.precision=bf16 micro_batch=4"), steps=1)
    for trace in run(pool, "lora", "dp_shard=2 train.precision=bf16", steps=1):
        assert trace.losses == pytest.approx(expected.losses, rel=1e-6)
        for name, weight in trace.weights.items():
            if not is_adapter(name):
                np.testing.assert_array_equal(weight, expected.weights[name], err_msg=name)
                assert not (weight.view(np.uint32) & 0xFFFF).any()
        assert (trace.weights["layers.0.attn.qkv.lora_a"].view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2", "tp=2", "dp_shard=2 tp=2", "pp=2"])
def test_lion_moves_each_weight_alike_in_every_layout(pool: Pool, layout: str) -> None:
    """By the sign of a sum whose last bits depend on the layout: where that sum is zero but for these bits, one weight in thousands
    moves the other way. All others are equal."""
    keys = "optim.name=lion optim.lr=1e-3"
    expected = reference("llama", of_one_process(f"{layout} {keys}"), steps=3)
    for trace in run(pool, "llama", f"{layout} {keys}", steps=3):
        np.testing.assert_allclose(trace.losses, expected.losses, rtol=1e-4)
        for name, weight in trace.weights.items():
            close = np.isclose(weight, expected.weights[name], rtol=1e-5, atol=1e-6)
            assert close.mean() > 0.999, name


@pytest.mark.parametrize(
    "layout",
    [
        "dp_replicate=4",
        "dp_shard=4",
        "dp_replicate=2 dp_shard=2",
        "cp=2 dp_shard=2 ep=4",
        "pp=2 dp_shard=2 schedule=zbv",
        "dp_shard=2 tp=2",
    ],
)
def test_the_same_layout_gives_the_same_bits_again(pool: Pool, layout: str) -> None:
    first, again = run(pool, "moe", layout), run(pool, "moe", layout)
    for one, other in zip(first, again, strict=True):
        assert (one.losses, one.norms) == (other.losses, other.norms)
        assert all(np.array_equal(one.weights[name], other.weights[name]) for name in one.weights)


COMPILED = ["dp_shard=2", "cp=2", "cp=2 cp_kind=ulysses", "tp=2", "tp=2 sp=false", "dp_shard=2 ep=2", "cp=2 ep=2"]


@pytest.mark.parametrize(
    ("layout", "scope"),
    [
        ("tp=2 sp=false model.layers=1", "block"),
        *(pytest.param(layout, scope, marks=pytest.mark.slow) for layout in COMPILED for scope in ("block", "model")),
    ],
)
def test_a_compiled_layout_computes_the_same(pool: Pool, layout: str, scope: str) -> None:
    require_equal("moe", layout, run(pool, "moe", layout, train_compiled, scope))


REGION, EXPERTS = "argosy.parallel.tensor.region", "argosy.parallel.tensor.apply:_enter_experts"
BUGS = [  # layout, function, what it is replaced by (in dist/bugs.py)
    ("dp_replicate=2", "argosy.parallel.replicas:start_sum", "never_started"),
    ("dp_replicate=2", "argosy.parallel.data_parallel:DataParallel._before_pass", "armed_in_every_pass"),
    ("dp_replicate=2 dp_shard=2", "argosy.parallel.mesh:Mesh.sum_", "nothing"),
    ("dp_shard=2", "argosy.parallel.fsdp:FSDPModule.set_gradient_divide_factor", "nothing"),
    ("dp_shard=2", "argosy.parallel.shards:dist.all_reduce", "nothing"),
    ("cp=2", "argosy.parallel.replicas:start_sum", "never_started"),
    ("cp=2", "argosy.parallel.exchange:scatter_sum_into", "own_part_only"),
    ("cp=2", "argosy.parallel.cp:Cut.joined", "in_order_of_ranks"),
    ("cp=2", "argosy.parallel.cp:_summed", "unchanged"),
    ("cp=2 cp_kind=ulysses", "argosy.parallel.exchange:_Swap.backward", "unswapped_gradients"),
    ("pp=2 model.tied=true", "argosy.parallel.pipeline.shared:SharedWeights.sum_gradients", "nothing"),
    ("pp=2", "argosy.parallel.mesh:Mesh.sum_", "nothing"),
    ("tp=2 sp=false", f"{REGION}:summed", "unsummed"),
    ("tp=2 sp=false", "argosy.parallel.data_parallel:partial_parameters", "none_of_them"),
    ("tp=2", "argosy.parallel.data_parallel:partial_parameters", "none_of_them"),
    ("tp=2", f"{REGION}:summed_to_shares", "own_share"),
    ("tp=2", "argosy.parallel.tensor.vocabulary:gather_into", "own_rows_only"),
    ("tp=2", EXPERTS, "undivided"),
    ("dp_shard=2 ep=2", "argosy.parallel.exchange:_Send.backward", "unsent_gradients"),
    ("dp_shard=2 ep=2", "argosy.parallel.ep:sort_by_expert", "as_they_come"),
    ("dp_replicate=2 dp_shard=2 ep=2", "argosy.parallel.fsdp:_with_copies", "without_copies"),
]


@pytest.mark.parametrize(("layout", "where", "bug"), BUGS)
def test_a_planted_bug_is_noticed(pool: Pool, layout: str, where: str, bug: str) -> None:
    """By the model with experts, which has whatever the others have."""
    traces = run(pool, "moe", layout, train_broken, where, bug)
    with pytest.raises(AssertionError):
        require_equal("moe", layout, traces)

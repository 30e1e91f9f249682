"""A layout that cannot work is refused from the spec alone, with the arithmetic and the nearest one that works."""

from __future__ import annotations

import re

import pytest

from argosy.config.layout import check_world
from argosy.config.resolve import resolve
from argosy.config.schema import ParallelSpec, RunSpec
from argosy.errors import ArgosyError

LLAMA = ["layers=4", "hidden=48", "heads=12", "kv_heads=6", "ffn=96", "vocab_size=64", "max_seq_len=24"]


def spec_of(*parallel: str, batch: int = 24) -> RunSpec:
    return resolve(
        None,
        [
            "model.preset=mixtral-8x7b", *(f"model.{key}" for key in LLAMA), "model.moe={experts: 6, top_k: 2, ffn: 24}",
            "data.train=x", f"train.global_batch={batch}", "train.steps=1", "optim.lr=1", "parallel.micro_batch=1",
            *(key if "." in key else f"parallel.{key}" for key in parallel),
        ],
    ).spec  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "cause", "fix"),
    [
        (["tp=4"], "key/value heads, 6, cannot be cut into tp 4", "parallel.tp 3 or 6"),
        (["tp=5"], "heads, 12, cannot be cut into tp 5", "parallel.tp 3 or 6"),
        (
            ["tp=6", "cp=3"],
            "data.seq_len, 24, cannot be cut into 2 x cp 3 x tp 6 = 36 equal shares",
            "parallel.sp=false",
        ),
        (
            ["tp=6", "data.seq_len=21"],
            "data.seq_len, 21, cannot be cut into tp 6 equal shares of tokens",
            "a length of 18",
        ),
        (["tp=2", "model.moe.ffn=23"], "experts' ffn, 23, cannot be cut into tp 2", "parallel.tp 1"),
        (["tp=6", "model.vocab_size=9"], "9 in parts of 2 leaves no rows for the last of tp 6", "parallel.tp 3"),
        (["pp=5"], "4 layers cannot fill 5 pipeline stages", "parallel.pp 4"),
        (["pp=4", "schedule=zbv"], "4 layers cannot fill 8 pipeline stages = pp 4 x vpp 2", "parallel.pp 2"),
        (["pp=2", "schedule=zbv", "vpp=3"], "zbv has two stages on each rank", "vpp=2"),
        (["pp=2", "schedule=interleaved-1f1b", "vpp=1"], "needs several stages on each rank", "schedule=1f1b"),
        (["pp=2", "vpp=2"], "1f1b has one stage on each rank", "schedule=interleaved-1f1b"),
        (["vpp=2"], "virtual pipeline stages need pipeline parallelism", "vpp=1"),
        (
            ["pp=2", "schedule=dualpipev", "micro_batch=8"],
            "3 micro-batches of 8 on each of 1 data-parallel",
            "schedule=zbv",
        ),
        (["pp=2", "compile=model"], "no pipeline rank holds the whole model", "compile=block"),
        (["pp=2", "schedule=zbv", "compile=block"], "a compiled block computes both at once", "schedule=1f1b"),
        (["cp=5"], "data.seq_len, 24, cannot be cut into 2 x cp 5 = 10", "parallel.cp 4 or 6"),
        (
            ["cp=4", "tp=2", "sp=false", "cp_kind=ulysses"],
            "heads on each of tp 2 ranks, 6, cannot be cut into cp 4",
            "cp 3 or 6",
        ),
        (["ep=4", "dp_shard=4"], "experts, 6, cannot be cut into ep 4", "parallel.ep 2"),
        (["ep=3", "dp_shard=2"], "dp_shard x cp ranks that hold the experts, 2, cannot", "parallel.ep 2"),
        (["dp_shard=5"], "global_batch 24 is not a multiple of micro_batch 1 x 5", "global_batch 20 or 25"),
        (
            ["dp_shard=5", "micro_batch=auto"],
            "global_batch 24 is not a multiple of 5 data-parallel",
            "use global_batch 20 or 25",
        ),
    ],
)
def test_an_axis_that_does_not_divide_is_refused(keys: list[str], cause: str, fix: str) -> None:
    with pytest.raises(ArgosyError) as refusal:
        spec_of(*keys)
    assert refusal.value.code == "config.arithmetic"
    assert cause in refusal.value.cause
    assert fix in refusal.value.fix
    if advice := re.fullmatch(r"use parallel\.(\w+) (\d+)(?: or (\d+))?", refusal.value.fix):
        # The sizes in the advice are not refused for the same axis.
        for size in filter(None, advice.groups()[1:]):
            assert not refused_for(advice[1], *keys, f"{advice[1]}={size}")


def refused_for(axis: str, *keys: str) -> bool:
    try:
        spec_of(*keys)
    except ArgosyError as error:
        return error.key == f"parallel.{axis}"
    return False


@pytest.mark.parametrize(("preset", "why"), [("bert-base", "whole sequence"), ("t5-base", "two sequences")])
def test_context_parallelism_says_why_it_is_for_decoders_only(preset: str, why: str) -> None:
    keys = ["data.train=x", "train.global_batch=8", "train.steps=1", "optim.lr=1", "parallel.cp=2"]
    with pytest.raises(ArgosyError, match=why):
        resolve(None, [f"model.preset={preset}", *keys])


def test_experts_elsewhere_are_compiled_or_recomputed_but_not_both() -> None:
    with pytest.raises(ArgosyError, match="expert row counts are data-dependent"):
        spec_of("ep=2", "dp_shard=2", "compile=block", "recompute=selective")
    assert spec_of("ep=2", "dp_shard=2", "compile=block").parallel.ep == 2


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (["dp_replicate=2", "dp_shard=2"], "parallel.dp_replicate 2: "),
        (["dp_shard=2", "ep=2"], "parallel.ep 2: "),
        (["pp=2"], "parallel.pp 2: "),
        (["compile=block"], "parallel.compile block: "),
        (["recompute=full", "model.dropout=0.1"], "parallel.recompute full: with dropout"),
    ],
)
def test_graphs_that_are_asked_for_are_refused_with_what_cannot_be_captured(keys: list[str], named: str) -> None:
    with pytest.raises(ArgosyError, match=f"with {named}") as refused:
        spec_of("graph=on", *keys)
    assert refused.value.key == "parallel.graph"
    fixed = str(refused.value.fix).partition(", or parallel.")[2]
    key = keys[1] if "ep=" in keys[-1] else keys[0]
    assert fixed.partition("=")[0] == key.partition("=")[0]
    assert spec_of(*keys).parallel.graph == "auto"


@pytest.mark.parametrize(
    "keys",
    ["dp_replicate=2 tp=2 sp=false cp=3", "dp_shard=4 tp=2 sp=false", "dp_shard=2 cp=3"],
)
def test_graphs_of_data_tensor_and_context_parallelism_are_taken(keys: str) -> None:
    assert spec_of("graph=on", *keys.split()).parallel.graph == "on"


def test_layouts_that_divide_are_taken() -> None:
    assert (
        spec_of("tp=6", "sp=false", "pp=4", "cp=3", "dp_shard=2", "dp_replicate=3", "ep=6").parallel.world_size
        == 6 * 4 * 3 * 6
    )


@pytest.mark.parametrize(
    ("layout", "ranks", "fix"),
    [
        ({"dp_shard": 4}, 8, "parallel.dp_shard=8"),
        ({"dp_shard": 4, "micro_batch": 6}, 8, "parallel.dp_shard=8 parallel.micro_batch=3"),
        ({"dp_shard": 4}, 9, "9 data-parallel ranks, which do not divide train.global_batch 24"),
        ({"dp_shard": 4}, 1, "--nproc 4"),
        ({"dp_replicate": 2, "dp_shard": 2}, 8, "parallel.dp_shard=4"),
        ({"dp_replicate": 2}, 3, "parallel.dp_shard=3 parallel.dp_replicate=1"),
        ({"tp": 4, "dp_shard": 2}, 6, "fits 4 or 8 processes"),
    ],
)
def test_a_wrong_number_of_processes_is_refused_with_both_numbers(layout: dict[str, int], ranks: int, fix: str) -> None:
    parallel = ParallelSpec.model_validate({"micro_batch": 1, **layout})
    with pytest.raises(ArgosyError) as refusal:
        check_world(parallel, ranks, "test", batch=24)
    assert f"= {parallel.world_size} process" in refusal.value.cause
    assert f" {ranks} (test)" in refusal.value.cause
    assert fix in refusal.value.fix
    check_world(parallel, parallel.world_size, "test")

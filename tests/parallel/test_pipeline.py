"""A pipeline's plan: which layers are where, in which order ranks work, and how long they stand idle."""

from __future__ import annotations

from collections import Counter, deque
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.config.pipeline import describe_bubble
from argosy.config.resolve import resolve, resolve_model
from argosy.config.schema import ParallelSpec
from argosy.config.stage_layers import V_SHAPED, bubble, split_costs, split_layers
from argosy.model.build import build_model
from argosy.parallel.pipeline.schedules import Action, Orders, forward_order, sources, training_order, with_messages
from argosy.parallel.pipeline.stage_cut import cut_stages, keep_stages

TIMES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # as the matrix products of a layer have them
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("zbv", 2), ("dualpipev", 2)]


def orders_of(schedule: str, ranks: int, pieces: int, micros: int) -> Orders | None:
    """None where the schedule cannot take so many."""
    try:
        return training_order(schedule, ranks, pieces, micros)
    except ValueError:
        return None


def idle_share(orders: Orders) -> float:
    """Of a step, when all stages take equally long and messages no time: all ranks replayed together."""
    last = max(action.stage for order in orders for action in order)
    ends: dict[Action, float] = {}
    waiting, now = [deque(order) for order in orders], [0.0] * len(orders)
    while any(waiting):
        for rank, queue in enumerate(waiting):
            while queue and (not (needed := sources(queue[0], last)) or any(one in ends for one in needed)):
                action = queue.popleft()
                start = max([now[rank], *(ends[one] for one in needed if one in ends)])
                now[rank] = ends[action] = start + TIMES[action.kind]
    busy = sum(TIMES[action.kind] for order in orders for action in order)
    return 1 - busy / (len(orders) * max(now))


@pytest.mark.parametrize(("schedule", "pieces"), SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_bubble_that_is_told_is_that_of_the_order(schedule: str, pieces: int, ranks: int) -> None:
    for micros in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32):
        if (orders := orders_of(schedule, ranks, pieces, micros)) is not None:
            parallel = ParallelSpec(micro_batch=1, pp=ranks, vpp=pieces, schedule=schedule)  # type: ignore[arg-type]
            assert bubble(parallel, micros)[0] == pytest.approx(idle_share(orders))


@given(st.sampled_from(SCHEDULES), st.sampled_from([2, 3, 4]), st.integers(1, 12), st.booleans())
@settings(deadline=None, max_examples=60)
def test_two_ranks_have_what_they_exchange_in_the_same_order(
    schedule: tuple[str, int], ranks: int, micros: int, training: bool
) -> None:
    name, pieces = schedule
    orders = orders_of(name, ranks, pieces, micros) if training else forward_order(name, ranks, pieces, micros)
    if orders is None:
        return
    full = with_messages(orders, name)
    assert [[a for a in order if a.kind in TIMES] for order in full] == orders
    held = [{a.stage for a in order if a.kind in TIMES} for order in full]
    for one, other in combinations(range(ranks), 2):
        assert _between(full[one], held[other]) == _between(full[other], held[one])


def _between(order: list[Action], theirs: set[int]) -> list[tuple[str, int, int]]:
    """Messages a rank has with another, as (pass, the stage that sends, micro-batch)."""
    found = []
    for kind, stage, micro in order:
        if kind in TIMES:
            continue
        way, step = kind[-1], 1 if kind[-1] == "F" else -1
        sends = kind.startswith("send")
        if stage + (step if sends else -step) in theirs:
            found.append((way, stage if sends else stage - step, micro))
    return found


@given(st.lists(st.integers(1, 50), min_size=3, max_size=9), st.integers(1, 4))
def test_the_slowest_stage_is_as_fast_as_can_be(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))
    found = split_costs([float(cost) for cost in costs], stages)
    assert [layer for part in found for layer in part] == list(range(len(costs)))
    assert all(found)
    slowest = max(sum(costs[layer] for layer in part) for part in found)
    ways = ([0, *cuts, len(costs)] for cuts in combinations(range(1, len(costs)), stages - 1))
    assert slowest == min(max(sum(costs[a:b]) for a, b in pairwise(way)) for way in ways)


def test_the_stage_with_the_output_gets_fewer_layers() -> None:
    assert [len(part) for part in split_layers(resolve_model("llama3-8b", []), 4, 8192)] == [8, 9, 9, 6]


@pytest.mark.parametrize("preset", ["gpt2", "llama3-8b", "bert-base", "t5-base"])
@pytest.mark.parametrize(("schedule", "pp", "vpp"), [("1f1b", 4, 1), ("interleaved-1f1b", 2, 2), ("zbv", 2, 2)])
def test_ranks_hold_every_parameter_under_its_name_and_only_shared_ones_twice(
    preset: str, schedule: str, pp: int, vpp: int
) -> None:
    sizes = ["layers=4", "hidden=32", "heads=4", "kv_heads=4", "ffn=64", "vocab_size=64", "max_seq_len=32"]
    model = resolve_model(preset, sizes)
    stages = cut_stages(model, ParallelSpec(micro_batch=1, pp=pp, vpp=vpp, schedule=schedule), 32)  # type: ignore[arg-type]
    whole = build_model(model, "meta")
    names = []
    for rank in range(pp):
        part = build_model(model, "meta")
        keep_stages(part, stages, rank)
        names.append([name for name, _ in part.named_parameters()])
    assert {name for rank in names for name in rank} == {name for name, _ in whole.named_parameters()}
    counts = Counter(name for rank in names for name in rank)
    tied = {"embed.tokens.weight", "encoder.embed.tokens.weight"} if model.tied and schedule not in V_SHAPED else set()
    stacks = {"encoder.relative.weight", "decoder.relative.weight"}  # of whatever ranks have layers of the stack
    assert {name for name, ranks in counts.items() if ranks > 1} - stacks == counts.keys() & tied


def test_few_micro_batches_are_warned_of_with_the_arithmetic() -> None:
    keys = ["model=gpt2", "data.train=x", "train.steps=1", "optim.lr=1", "parallel.pp=4", "parallel.micro_batch=2"]
    text, long = describe_bubble(resolve(None, [*keys, "train.global_batch=2"]).spec)
    assert long
    assert "75% of the step = 3 / (1 + 3)" in text
    assert "27 micro-batches would make it 10%" in text
    text, long = describe_bubble(resolve(None, [*keys, "train.global_batch=64"]).spec)
    assert not long
    assert "9% of the step = 3 / (32 + 3)" in text

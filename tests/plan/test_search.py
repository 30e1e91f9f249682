"""Layouts that the search returns fit, divide and are ranked."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from argosy.config.batches import divisors
from argosy.config.resolve import resolve, resolve_model
from argosy.errors import ArgosyError
from argosy.plan.calibration import calibration
from argosy.plan.hardware import parse_cluster
from argosy.plan.layout_rules import violations
from argosy.plan.layouts import Layout, Work, parallel_keys
from argosy.plan.refused_questions import nothing_found
from argosy.plan.search import EQUAL, Candidate, Found, evaluate, micro_batches, search


def found(model: str, cluster: str, batch: int, seq_len: int, **fixed: object) -> Found:
    known = calibration()
    return search(
        Work(resolve_model(model), seq_len, batch), parse_cluster(cluster), known.stacks["argosy"], known, fixed
    )


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "seq_len"),
    [
        # 7 B parameters on 16 A100 with 40 GB.
        ("llama2-7b", "2xp4d.24xlarge", 512, 4096),
        ("gpt3-175b", "64xp4de.24xlarge", 1536, 2048),
        ("mixtral-8x7b", "4xp5.48xlarge", 256, 4096),
        ("llama3-8b", "8xH100", 64, 131072),
    ],
)
def test_the_best_layouts_fit_divide_and_are_ranked(model: str, cluster: str, batch: int, seq_len: int) -> None:
    best = found(model, cluster, batch, seq_len).best
    assert best
    assert all(candidate.fits for candidate in best)
    for candidate in best[:20]:
        assert not list(violations(candidate.work, candidate.layout, candidate.cluster.gpus))
    # The chosen micro-batch of each layout comes first. The others are in the order of their times behind it.
    by_layout: dict[Layout, list[Candidate]] = {}
    for candidate in best:
        by_layout.setdefault(replace(candidate.layout, micro_batch=1), []).append(candidate)
    firsts = [chosen.time.total for chosen, *_ in by_layout.values()]
    assert firsts == sorted(firsts)
    for chosen, *others in by_layout.values():
        times = [other.time.total for other in others]
        assert times == sorted(times)
        assert all(chosen.time.total <= EQUAL * time for time in times)
    latest = 0.0
    for candidate in best:
        chosen = by_layout[replace(candidate.layout, micro_batch=1)][0]
        place = max(candidate.time.total, chosen.time.total)
        assert place >= latest
        latest = place
    assert 0.25 < best[0].mfu < 0.75


def test_values_can_be_held() -> None:
    best = found("llama2-7b", "2xp4d.24xlarge", 512, 4096, tp=4, recompute="full").best
    assert best
    assert {(c.layout.tp, c.layout.recompute) for c in best} == {(4, "full")}


def test_what_does_not_fit_names_the_least_it_needs() -> None:
    nothing = found("gpt3-175b", "1xH100", 8, 2048)
    assert not nothing.best
    assert nothing.nearest is not None
    assert nothing.nearest.fullest.device > 79


def test_a_run_that_asks_for_graphs_gets_only_layouts_that_can_be_captured() -> None:
    """The fastest layout of the same model without them is a pipeline."""
    known, cluster = calibration(), parse_cluster("4xp5.48xlarge")
    work = Work(resolve_model("llama3-70b"), 4096, 64)
    free, captured = (
        search(each, cluster, known.stacks["argosy"], known, {}).best
        for each in (work, replace(work, captured_only=True))
    )
    assert free
    assert free[0].layout.pp > 1
    assert captured
    assert all(candidate.layout.pp == candidate.layout.copies == 1 for candidate in captured)
    assert captured[0].layout.zero == 3


def test_no_layout_is_offered_with_graphs_that_the_run_spec_refuses() -> None:
    """With dropout, a block that is run again needs the random numbers of its first run."""
    known, cluster = calibration(), parse_cluster("1xp5.48xlarge")
    work = Work(resolve_model("llama3-8b", ["dropout=0.1"]), 32768, 64)
    free, captured = (
        search(replace(work, captured_only=only), cluster, known.stacks["argosy"], known, {}).best
        for only in (False, True)
    )
    assert any(candidate.layout.recompute != "none" for candidate in free)
    assert all(candidate.layout.recompute == "none" for candidate in captured)


@pytest.mark.parametrize("graph", ["auto", "on"])
def test_what_fits_only_without_graphs_is_told_to_do_without(graph: str) -> None:
    known, cluster = calibration(), parse_cluster("4xp5.48xlarge")
    work = Work(resolve_model("llama3-70b", ["dropout=0.1"]), 32768, 64, captured_only=graph == "on")
    answer = search(work, cluster, known.stacks["argosy"], known, {})
    assert bool(answer.best) == (graph == "auto")
    fix = nothing_found(work, cluster, {}, found("gpt3-175b", "1xH100", 8, 2048)).fix
    assert str(fix).startswith("parallel.graph=auto, which allows pp, ep") == (graph == "on")


@pytest.mark.parametrize(
    ("fixed", "is_cause"), [({"pp": 2}, True), ({"copies": 2}, True), ({"ep": 2}, False), ({"tp": 3}, False)]
)  # fmt: skip
def test_a_layout_that_only_graphs_rule_out_is_told_so(fixed: dict[str, object], is_cause: bool) -> None:
    known, cluster = calibration(), parse_cluster("8xH100")
    work = Work(resolve_model("gpt2-large"), 1024, 64, captured_only=True)
    answer = search(work, cluster, known.stacks["argosy"], known, fixed)
    assert not answer.best
    told = nothing_found(work, cluster, fixed, answer)
    assert ("cannot be captured, which parallel.graph=on requires" in told.cause) == is_cause
    assert (told.fix == "parallel.graph=auto") == is_cause
    free = search(replace(work, captured_only=False), cluster, known.stacks["argosy"], known, fixed)
    assert bool(free.best) == is_cause


def test_what_is_offered_can_be_written_in_a_run_spec() -> None:
    for candidate in found("gpt3-175b", "64xp4de.24xlarge", 1536, 2048).best:
        keys = parallel_keys(candidate.layout)
        assert ("vpp" in keys) == (keys.get("schedule") == "interleaved-1f1b")
        # A run spec can shard over data-parallel ranks only.
        if candidate.layout.zero:
            assert candidate.layout.dp > 1
    assert any(candidate.layout.vpp > 1 for candidate in found("gpt3-175b", "64xp4de.24xlarge", 1536, 2048).best)


def test_shards_stay_within_a_node_where_the_network_is_slow() -> None:
    best = found("llama2-7b", "4xp4de.24xlarge", 512, 4096).best[0].layout
    assert (best.zero, best.copies, best.shards) == (3, 4, 8)
    assert parallel_keys(best)["dp_replicate"] == 4
    assert parallel_keys(best)["dp_shard"] == 8


@pytest.mark.parametrize(
    ("model", "batch", "seq_len", "micro_batch"),
    [("gpt2", 488, 1024, 61), ("gpt2", 480, 1024, 60), ("gpt2-large", 56, 1024, 7), ("llama3-1b", 120, 8192, 3)],
)
def test_micro_batches_that_are_no_powers_of_two_are_found(
    model: str, batch: int, seq_len: int, micro_batch: int
) -> None:
    best = found(model, "8xH100", batch, seq_len).best[0]
    assert (best.layout.dp, best.layout.micro_batch) == (8, micro_batch)


@pytest.mark.parametrize("batch", [8, 24, 56, 96, 360, 480, 488, 504, 512])
def test_no_micro_batch_of_the_replicas_is_faster_than_the_answer(batch: int) -> None:
    best = found("gpt2", "8xH100", batch, 1024).best[0]
    for size in divisors(batch // 8):
        other = evaluate(best.work, Layout(dp=8, micro_batch=size), best.cluster, best.stack, best.known)
        assert best.time.total <= EQUAL * other.time.total


@pytest.mark.parametrize(("model", "cluster", "batch"), [("gpt2", "1xH100", 480), ("llama2-7b", "8xH100", 240)])
def test_a_layout_has_the_micro_batch_that_a_run_with_it_chooses(model: str, cluster: str, batch: int) -> None:
    best = found(model, cluster, batch, 1024).best
    # With recompute, the search has only the sizes that need it.
    kept = [candidate for candidate in best if candidate.layout.recompute == "none"]
    firsts = {replace(candidate.layout, micro_batch=1): candidate for candidate in reversed(kept)}
    for first in firsts.values():
        [chosen, *_] = micro_batches(first.work, first.layout, first.cluster, first.stack, first.known)
        assert first.layout == chosen.layout


def test_a_micro_batch_that_is_held_need_not_be_one_that_the_search_tries() -> None:
    assert {c.layout.micro_batch for c in found("gpt2", "8xH100", 2048, 1024, micro_batch=256).best} == {256}


def test_every_batch_of_a_ramp_is_divided() -> None:
    known = calibration()
    work = Work(resolve_model("gpt2"), 1024, 512, ramp_divisor=8)
    best = search(work, parse_cluster("4xH100"), known.stacks["argosy"], known).best
    assert best
    assert all(8 % (candidate.layout.dp * candidate.layout.micro_batch) == 0 for candidate in best)


def test_divisors_of_a_large_number_are_found_up_to_a_limit() -> None:
    assert divisors(10**18, 30) == (1, 2, 4, 5, 8, 10, 16, 20, 25)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(12, 5) == (1, 2, 3, 4)


def test_a_micro_batch_that_cannot_run_is_not_the_one_to_fall_back_to() -> None:
    known, nodes = calibration(), parse_cluster("4xL4")
    layout = Layout(pp=4, vpp=2, schedule="interleaved-1f1b")
    # No size fits. 18, 9 and 6 micro-batches of 1, 2 and 3 samples: the first two cannot be split into equal rounds of 4 or more.
    work = Work(resolve_model("llama2-13b"), 4096, 18)
    [smallest] = micro_batches(work, layout, nodes, known.stacks["argosy"], known)
    assert not smallest.fits
    assert smallest.layout.micro_batch == 3
    # 61 samples cannot be split over 8 ranks.
    odd = Work(resolve_model("gpt2"), 1024, 61)
    assert micro_batches(odd, Layout(dp=8), parse_cluster("8xH100"), known.stacks["argosy"], known) == []


@pytest.mark.parametrize("micros", range(1, 40))
@pytest.mark.parametrize("pp", [2, 4, 6])
def test_the_planner_and_a_run_accept_the_same_numbers_of_interleaved_micro_batches(micros: int, pp: int) -> None:
    layout = Layout(pp=pp, vpp=2, schedule="interleaved-1f1b")
    keys = [f"train.global_batch={micros}", f"parallel.pp={pp}", "parallel.schedule=interleaved-1f1b"]
    refused = any(violations(Work(resolve_model("gpt2"), 1024, micros), layout, pp))
    given = ["model=gpt2", "data.train=corpus", "train.steps=10", "optim.lr=1e-4", "parallel.micro_batch=1", *keys]
    with pytest.raises(ArgosyError) if refused else nullcontext():
        resolve(None, given)

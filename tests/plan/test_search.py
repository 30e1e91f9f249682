"""Layouts that the search returns fit, divide and are ranked."""

from __future__ import annotations

import pytest

from argosy.config.resolve import resolve_model
from argosy.plan.calibration import calibration
from argosy.plan.hardware import parse_cluster
from argosy.plan.layouts import Work, parallel_keys, violations
from argosy.plan.search import Found, search


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
    times = [candidate.time.total for candidate in best]
    assert times == sorted(times)
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

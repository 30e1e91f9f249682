"""`parallel: auto` becomes a layout once the ranks are known; keys that the spec sets stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch

from argosy.config.resolve import Resolved, resolve
from argosy.errors import ArgosyError
from argosy.parallel.mesh import Mesh
from argosy.plan.advise import Question, answer
from argosy.plan.auto import ORIGIN, cluster_of, is_open, settle_layout
from argosy.plan.clusters import compare
from argosy.plan.hardware import parse_cluster
from argosy.train.session import open_session

KEYS = ["model.preset=llama2-7b", "data.train=corpus", "train.global_batch=512", "train.steps=10", "optim.lr=1e-4"]


def settled(ranks: int, planned_on: str | None, *more: str) -> Resolved:
    overrides = [*KEYS, *more]
    cluster = None if planned_on is None else parse_cluster(planned_on)
    return settle_layout(resolve(None, overrides), None, overrides, ranks, cluster)


def test_the_planner_fills_an_open_layout_and_says_so() -> None:
    found = settled(16, "2xp4d.24xlarge")
    assert found.spec.parallel.world_size == 16
    # Pure data parallelism (replicas) does not fit.
    assert found.spec.parallel.dp_shard > 1 or found.spec.parallel.tp > 1
    assert found.origins["parallel.micro_batch"] == ORIGIN
    assert found.origins["optim.lr"] == "command line"


@pytest.mark.parametrize(
    ("model", "cluster", "ranks"),
    [
        ("llama3-8b", "2xp4d.24xlarge", 16),
        ("bert-large", "2xp4d.24xlarge", 16),
        ("t5-large", "2xp4d.24xlarge", 16),
        ("mixtral-8x7b", "4xp5.48xlarge", 32),
        ("qwen3-8b", "4xp5.48xlarge", 32),
    ],
)
def test_what_the_planner_chooses_can_be_run(model: str, cluster: str, ranks: int) -> None:
    overrides = [f"model.preset={model}", *KEYS[1:]]
    # settle_layout resolves the spec again, which checks the layout.
    found = settle_layout(resolve(None, overrides), None, overrides, ranks, parse_cluster(cluster))
    assert found.spec.parallel.world_size == ranks


def test_what_the_spec_says_itself_stays() -> None:
    kept = settled(16, "2xp4d.24xlarge", "parallel.micro_batch=2", "parallel.recompute=full")
    assert (kept.spec.parallel.micro_batch, kept.spec.parallel.recompute) == (2, "full")
    assert kept.spec.parallel.world_size == 16
    named = settled(16, "2xp4d.24xlarge", "parallel.tp=2")
    assert not is_open(named)
    # The check of the world size refuses it later.
    assert named.spec.parallel.world_size == 2


def test_a_micro_batch_of_any_size_and_every_batch_of_a_ramp_get_a_layout() -> None:
    gpt2 = ["model.preset=gpt2", *KEYS[1:2], *KEYS[3:]]
    for more in (
        ["train.global_batch=480", "parallel.micro_batch=6"],
        ["train.global_batch=2048", "parallel.micro_batch=256"],
        ["train.global_batch=512", "train.batch_rampup={start: 16, increment: 8, samples: 1000}"],
    ):
        overrides = [*gpt2, *more]
        found = settle_layout(resolve(None, overrides), None, overrides, 8, parse_cluster("8xH100"))
        assert found.spec.parallel.world_size == 8


def test_ranks_the_planner_knows_nothing_of_become_replicas() -> None:
    found = settled(4, None)
    assert (found.spec.parallel.dp_replicate, found.spec.parallel.world_size) == (4, 4)
    assert found.spec.train.global_batch % (4 * found.spec.parallel.micro_batch) == 0


def test_one_rank_needs_no_layout() -> None:
    assert settled(1, "1xH100").spec.parallel.world_size == 1


def test_the_cluster_is_the_specs_own_or_the_gpus_that_are_here() -> None:
    spec = resolve(None, [*KEYS, "cluster.instance=p4d.24xlarge", "cluster.nodes=2"]).spec
    assert cluster_of(spec, "NVIDIA H200", 16) == parse_cluster("2xp4d.24xlarge")
    assert cluster_of(spec, "NVIDIA H200", 8) == parse_cluster("8xH200")
    assert cluster_of(spec, None, 8) is None
    part = cluster_of(resolve(None, [*KEYS, "cluster={instance: p4d.24xlarge, nodes: 2, gpus: 4}"]).spec, None, 8)
    assert part is not None
    assert (part.gpu.name, part.gpus, part.gpus_per_node, part.domain) == ("A100-40", 8, 4, 4)
    assert part.price == pytest.approx(parse_cluster("1xp4d.24xlarge").price)


def test_a_run_keeps_what_was_predicted_for_it(write_spec: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from argosy.train import run

    monkeypatch.setattr(run, "name_of", lambda device: "NVIDIA H200")
    path: Path = write_spec()  # type: ignore[operator]
    run.train(resolve(path, ["train.steps=3"]), path, run.TrainOptions(quiet=True))
    plan = orjson.loads((path.parent / "runs" / "tiny" / "plan.json").read_bytes())
    assert plan["cluster"] == "1xH200"
    assert plan["step_s"] > 0
    assert plan["memory_gib"]
    monkeypatch.setattr(run, "name_of", lambda device: None)
    run.train(resolve(path, ["train.steps=4"]), path, run.TrainOptions(quiet=True))
    assert not (path.parent / "runs" / "tiny" / "plan.json").exists()


def test_a_length_in_epochs_is_that_of_the_data_and_unknown_without_it(write_spec: Callable[..., Path]) -> None:
    path = write_spec(train={"global_batch": 8, "epochs": 2})
    nothing = dict.fromkeys(("global_batch", "seq_len", "tokens", "precision", "what_if", "price", "hardware"))
    steps = open_session(resolve(path).spec, Mesh(torch.device("meta"))).steps
    here = Question.read(str(path), [], cluster="1xH100", **nothing)
    assert here.tokens == steps * 8 * 32
    elsewhere = Question.read(str(path), ["data.train=/not/here"], cluster="1xH100", **nothing)
    assert elsewhere.tokens is None
    assert "run         2ep of data that is not here; --tokens gives its length" in answer(elsewhere, top=1).lines()
    found = compare(
        ["1xH100", "2xH100"], lambda name: answer(replace(elsewhere, cluster=parse_cluster(name)), top=1), None
    )
    assert (
        found.lines()[0]
        == "run: 2ep of data that is not here; --tokens gives its length; the best layout of each cluster"
    )
    assert found.verdict() == "the length of the run is not known: --tokens gives it"
    with pytest.raises(ArgosyError, match="no cluster can be said to finish it in time"):
        compare(["H100"], lambda name: answer(replace(elsewhere, cluster=parse_cluster(name)), top=1), 3.0)


def test_a_question_about_a_run_is_about_the_gpus_that_it_uses() -> None:
    nothing = dict.fromkeys(
        ("cluster", "global_batch", "seq_len", "tokens", "precision", "what_if", "price", "hardware")
    )
    spec = resolve(None, [*KEYS, "cluster={instance: p4d.24xlarge, nodes: 2, gpus: 4}", "parallel.dp_shard=8"]).spec
    asked = Question.read(spec, [], **nothing)
    assert asked.cluster.gpus == 8
    assert asked.asked is not None

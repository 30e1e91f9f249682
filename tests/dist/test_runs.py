"""Whole runs on several ranks: what they read, what they leave, and how they end."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import forking
from argosy.checkpoint.store import latest
from argosy.config.resolve import resolve
from argosy.data.open import open_data
from argosy.errors import EXIT_DONE, EXIT_REFUSED, EXIT_RESUMABLE
from argosy.record.jsonl import read_jsonl, read_metrics
from argosy.train.run import TrainOptions
from argosy.train.run import train as train_alone
from dist import runs
from dist.pool import Pool
from suites.local_tasks import write_tasks

Write = Callable[..., Path]
LAYOUTS = [
    ["dp_replicate=2"], ["dp_shard=4"], ["dp_replicate=2", "dp_shard=2"], ["dp_shard=2", "cp=2"], ["dp_shard=2", "tp=2"], ["tp=2"],
    ["pp=2"], ["pp=2", "dp_shard=2"],
]  # fmt: skip


def keys(layout: list[str], *more: str) -> list[str]:
    return [*(f"parallel.{key}" for key in layout), "parallel.micro_batch=2", *more]


def ranks_of(layout: list[str]) -> int:
    product = 1
    for key in layout:
        product *= 1 if key.startswith("ep=") else int(key.split("=")[1])
    return product


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_together_read_the_samples_of_one_in_its_order(
    pool: Pool, write_spec: Write, layout: list[str]
) -> None:
    path = write_spec()
    stream = open_data(resolve(path).spec).training()
    found = pool.run(ranks_of(layout), runs.read_batches, str(path), keys(layout), 3)
    for step in range(3):
        distinct = found[:: 2 if {"cp=2", "tp=2"} & {*layout} else 1]  # ranks that share a sequence read the same
        if "pp=2" in layout:  # and so do the stages of a pipeline
            assert [rank[step] for rank in found[len(found) // 2 :]] == [
                rank[step] for rank in found[: len(found) // 2]
            ]
            distinct = found[: len(found) // 2]
        together = [sample for rank in distinct for sample in rank[step]]
        assert together == stream.batch(step * 8, 8).tokens.tolist()


def test_a_run_goes_on_in_another_layout_as_if_nothing_had_happened(
    pool: Pool, write_spec: Write, tmp_path: Path
) -> None:
    path = write_spec(optim={"lr": 1e-3, "schedule": "constant"})
    train_alone(resolve(path, ["name=one"]), path, TrainOptions(quiet=True))
    expected = read_metrics(tmp_path / "runs" / "one" / "metrics.jsonl")
    for steps, layout in enumerate((LAYOUTS[n] for n in (1, 6, 3, 4, 7, 5)), start=1):
        codes = pool.run(ranks_of(layout), runs.train, str(path), keys(layout, f"train.steps={steps}"))
        assert set(codes) == {EXIT_DONE}
    found = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert list(found) == list(expected)
    for step, record in expected.items():
        assert found[step]["loss"] == pytest.approx(record["loss"], rel=1e-5)
        assert found[step]["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-4)
    assert found[6]["validation_loss"] == pytest.approx(expected[6]["validation_loss"], rel=1e-5)
    events = [event["event"] for event in read_jsonl(tmp_path / "runs" / "tiny" / "events.jsonl")]
    assert [kind for kind in events if kind in ("start", "resume", "done")] == ["start", "done"] + [
        "resume",
        "done",
    ] * 5
    checkpoint = latest(tmp_path / "runs" / "tiny" / "checkpoints", print)
    assert checkpoint is not None
    whole = latest(tmp_path / "runs" / "one" / "checkpoints", print)
    assert whole is not None
    assert {n: w.shape for n, w in checkpoint.weights().items()} == {n: w.shape for n, w in whole.weights().items()}


def test_experts_are_saved_and_found_again_wherever_they_are(pool: Pool, write_spec: Write, tmp_path: Path) -> None:
    path = write_spec(optim={"lr": 1e-3, "schedule": "constant"})
    experts = ["model.mlp_bias=false", "model.moe={experts: 4, top_k: 2, ffn: 32, bias_rate: 0.01}"]
    train_alone(resolve(path, ["name=one", "parallel.micro_batch=2", *experts]), path, TrainOptions(quiet=True))
    expected = read_metrics(tmp_path / "runs" / "one" / "metrics.jsonl")
    for steps, layout in ((2, ["dp_shard=2", "ep=2"]), (4, ["dp_shard=2", "cp=2", "ep=4"]), (6, ["dp_replicate=2"])):
        more = keys(layout, f"train.steps={steps}", *experts)
        assert set(pool.run(ranks_of(layout), runs.train, str(path), more)) == {EXIT_DONE}
    found = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    for step, record in expected.items():
        for key in ("loss", "grad_norm", "balance_loss", "max_load"):
            assert found[step][key] == pytest.approx(record[key], rel=1e-4), (step, key)
    assert found[3]["validation_loss"] == pytest.approx(expected[3]["validation_loss"], rel=1e-5)


@pytest.mark.parametrize("layout", [LAYOUTS[n] for n in (0, 1, 3, 4, 6, 7)])
@pytest.mark.parametrize("samples", [1, 3, 7])
def test_evaluation_counts_every_sample_once_whatever_is_left_over(
    pool: Pool, write_spec: Write, layout: list[str], samples: int
) -> None:
    path = write_spec()
    expected = runs.validate(str(path), [], samples, 5)
    for found in pool.run(ranks_of(layout), runs.validate, str(path), keys(layout), samples, 5):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("layout", [LAYOUTS[n] for n in (0, 1, 7)])
def test_ranks_without_a_sample_report_the_metrics_of_the_others(
    pool: Pool, write_spec: Write, layout: list[str]
) -> None:
    experts = ["model.mlp_bias=false", "model.moe={experts: 4, top_k: 2, ffn: 32, balance_loss: 0.1}"]
    expected = runs.validate(str(path := write_spec()), experts, 1, 5)
    assert len(expected) > 1
    for found in pool.run(ranks_of(layout), runs.validate, str(path), keys(layout, *experts), 1, 5):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_replica_with_one_other_bit_is_named_on_every_rank(pool: Pool) -> None:
    assert pool.run(3, runs.odd_replicas_with_a_flip, None) == [[], [], []]
    assert pool.run(3, runs.odd_replicas_with_a_flip, 1) == [[1], [1], [1]]
    assert pool.run(2, runs.odd_replicas_with_a_flip, 1) == [[0, 1], [0, 1]], "of two, none is the odd one"


def words(path: Path, *more: str) -> list[str]:
    return ["train", str(path), *more, "--nproc", "2", "parallel.micro_batch=1"]


def test_ranks_started_here_stop_together_save_and_ask_to_be_run_again(write_spec: Write, tmp_path: Path) -> None:
    path = write_spec(train={"global_batch": 8, "steps": 5000}, eval="off", checkpoint={"every": 100_000})
    line = [*forking.ARGOSY, *words(path, "parallel.dp_shard=2", "--quiet")]
    process = forking.Popen(line, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    while not list(read_jsonl(metrics)):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == EXIT_RESUMABLE
    assert said.count("SIGTERM") == 1
    checkpoint = latest(tmp_path / "runs" / "tiny" / "checkpoints", print)
    assert checkpoint is not None
    assert checkpoint.progress.step == max(read_metrics(metrics))


def test_the_first_rank_that_fails_is_told_once(write_spec: Write) -> None:
    path = write_spec(optim={"lr": 1e30, "clip": None}, checkpoint={"every": 100}, eval="off")
    done = forking.run(words(path, "parallel.dp_replicate=2", "train.steps=30"), timeout=400)
    assert done.returncode == EXIT_REFUSED
    assert done.stderr.count("error[train.non-finite]") == 1
    assert "rank " in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_that_share_the_model_write_the_text_that_one_process_writes(
    pool: Pool, write_spec: Write, tmp_path: Path
) -> None:
    """Greedy decoding, whose tokens do not depend on the last bits of the weights."""
    path = write_spec(
        log={"every": 1, "samples": {"every": 2, "prompts": ["some words"], "tokens": 4, "temperature": 0}}
    )
    train_alone(resolve(path, ["name=one"]), path, TrainOptions(quiet=True))
    pool.run(2, runs.train, str(path), keys(["dp_shard=2"], "name=two"))
    one, two = (list(read_jsonl(tmp_path / "runs" / name / "samples.jsonl")) for name in ("one", "two"))
    assert [line["text"] for line in one] == [line["text"] for line in two]
    assert [line["step"] for line in two] == [2, 4, 6]


def test_ranks_that_share_requests_or_passes_score_and_write_what_one_process_does(
    pool: Pool, write_spec: Write, tmp_path: Path
) -> None:
    """Nine samples in batches of two: one rank has more of them, and texts of different lengths end at different tokens. Most
    lengths are no multiple of the parts into which a sequence is cut."""
    names = ["letters", "writing", "perplexing"]
    tasks = {"names": names, "dir": str(write_tasks(tmp_path / "tasks")), "every": 100, "batch": 2}
    samples = {"every": 100, "prompts": ["some words", "a"], "tokens": 4, "temperature": 0}
    path = write_spec(eval={"every": 100, "batches": 1, "tasks": tasks}, log={"every": 1, "samples": samples})

    def found(name: str) -> tuple[dict[str, float], list[str]]:
        run = tmp_path / "runs" / name
        scores = {k: v for k, v in read_metrics(run / "metrics.jsonl")[3].items() if k.startswith("task/")}
        return scores, [line["text"] for line in read_jsonl(run / "samples.jsonl")]

    train_alone(resolve(path, ["name=one", "train.steps=3"]), path, TrainOptions(quiet=True))
    scores, texts = found("one")
    assert {key.split("/")[1] for key in scores} == set(names)
    for layout in (["dp_shard=2"], ["dp_replicate=2"], ["tp=2"], ["tp=2", "sp=false"], ["pp=2"], ["cp=2"]):
        name = "-".join(layout).replace("=", "-")
        pool.run(2, runs.train, str(path), keys(layout, f"name={name}", "train.steps=3"))
        theirs, written = found(name)
        assert theirs == pytest.approx(scores, rel=1e-4), name
        assert written == texts, name


@pytest.mark.parametrize("where", ["block", "embedding", "head", "inputs"])
def test_a_pass_that_fails_on_one_rank_of_fsdp_gives_up_the_scores_and_not_the_run(
    pool: Pool, write_spec: Write, tmp_path: Path, where: str
) -> None:
    """The other rank waits for parameters of the one that failed, wherever in the pass that was. The next step's loss is that of
    a run without tasks."""
    names = ["letters", "writing"] if where == "block" else ["writing"]
    tasks = {"names": names, "dir": str(write_tasks(tmp_path / "tasks", samples=3)), "every": 2, "batch": 2}
    path = write_spec(eval={"every": 100, "batches": 1, "tasks": tasks})
    options = keys(["dp_shard=2"], "train.steps=3")
    codes = pool.run(2, runs.train_with_failing_passes, str(path), [*options, f"name={where}"], where)
    assert codes == [EXIT_DONE, EXIT_DONE]
    events = list(read_jsonl(tmp_path / "runs" / where / "events.jsonl"))
    failed = [event["warning"] for event in events if event["event"] == "tasks-failed"]
    assert failed == ["a batch failed on rank 1: RuntimeError: out of memory"] * 2
    if where == "block":
        pool.run(2, runs.train, str(path), [*options, "name=plain", "eval.tasks=null"])
        ours, plain = (read_metrics(tmp_path / "runs" / name / "metrics.jsonl")[3]["loss"] for name in (where, "plain"))
        assert ours == plain

"""Scores on tasks while training (`eval.tasks`): in the metrics, and of no consequence to the training numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint.store import latest
from argosy.config.resolve import resolve
from argosy.errors import ArgosyError
from argosy.infer.evaluate_tasks import evaluate_tasks
from argosy.record.jsonl import read_jsonl, read_metrics
from argosy.train.run import TrainOptions, train
from suites.local_tasks import write_tasks

Write = Callable[..., Path]
MOE = {
    "family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab_size": 257, "dropout": 0.1,
    "moe": {"experts": 4, "top_k": 2, "ffn": 16, "bias_rate": 0.01},
}  # fmt: skip
ROWS = {
    "choice": {"query": "Is it?", "choices": ["yes", "no"], "gold": 1},
    "winograd": {"context_options": ["the cat", "the dog"], "continuation": "barked", "gold": 1},
    "lambada": {"context": "the end of the", "continuation": "story"},
    "trivia": {"context": "Capital of France?", "answer": "Paris", "aliases": ["paris!", "Lutetia"]},
}
TYPES = {
    "choice": "multiple_choice",
    "winograd": "schema",
    "lambada": "language_modeling",
    "trivia": "generation",
}


def icl_tasks(directory: Path) -> list[dict[str, Any]]:
    for name, row in ROWS.items():
        (directory / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 4)
    more: dict[str, Any] = {"example_delimiter": "\n\n", "tokens": 4}
    return [{"name": n, "type": kind, "data": str(directory / f"{n}.jsonl"), **more} for n, kind in TYPES.items()]


def go(path: Path) -> Any:
    resolved = resolve(path, ["train.steps=3"])
    train(resolved, path, TrainOptions(quiet=True))
    checkpoint = latest(Path(resolved.spec.runs_dir) / resolved.spec.name / "checkpoints", print)
    assert checkpoint is not None
    return checkpoint.weights()


def test_scores_change_no_bit_of_the_training_and_are_those_of_the_checkpoint(
    write_spec: Write, tmp_path: Path
) -> None:
    """The model has dropout and experts with balancing biases, whose state a stray forward pass would change."""
    directory = write_tasks(tmp_path / "tasks")
    tasks = {"names": ["colours", "writing"], "dir": str(directory), "every": 2, "limit": 5, "icl": icl_tasks(tmp_path)}
    evaluation = {"every": 3, "batches": 2}
    scored = go(write_spec(model=MOE, name="with", eval=evaluation | {"tasks": tasks}))
    plain = go(write_spec(model=MOE, name="without", eval=evaluation))
    assert [name for name in plain.infos if not torch.equal(scored[name], plain[name])] == []
    metrics = read_metrics(tmp_path / "runs" / "with" / "metrics.jsonl")
    found = {step: {k: v for k, v in record.items() if k.startswith("task/")} for step, record in metrics.items()}
    assert [step for step, scores in found.items() if scores] == [2, 3]
    assert {key.split("/")[1] for key in found[3]} == {"colours", "writing", *ROWS}
    assert "task/winograd/acc" in found[3]
    assert "task/trivia/exact_match" in found[3]
    later, step = evaluate_tasks(
        str(tmp_path / "runs" / "with"), ["colours", "writing"], directory=directory, limit=5, device="cpu"
    )
    assert step == 3
    for name, one in later.items():
        assert one.metrics == pytest.approx({metric: found[3][f"task/{name}/{metric}"] for metric in one.metrics})


def test_a_task_that_fails_is_reported_and_training_goes_on(write_spec: Write, tmp_path: Path) -> None:
    # The template of the second row divides by zero: loading renders the first row only.
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n{"n": 0}\n')
    (tmp_path / "broken.yaml").write_text(
        json.dumps(
            {
                "task": "broken", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
                "test_split": "test", "output_type": "loglikelihood", "doc_to_text": "{{ 1 / n }}", "doc_to_target": "x",
                "metric_list": [{"metric": "acc"}],
            }
        )
    )  # fmt: skip
    tasks = {"names": ["broken"], "dir": str(tmp_path), "every": 2}
    go(write_spec(name="broken", eval={"every": 3, "batches": 1, "tasks": tasks}))
    events = list(read_jsonl(tmp_path / "runs" / "broken" / "events.jsonl"))
    failed = [(event["step"], event["warning"]) for event in events if event["event"] == "tasks-failed"]
    assert failed == [(step, "ZeroDivisionError: division by zero") for step in (2, 3)]
    assert events[-1]["event"] == "done"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"eval": {"tasks": {"every": 5}}}, "names no task"),
        ({"model": {"preset": "bert-base", "vocab_size": 300}, "data": {"train": "x", "seq_len": 32}}, "only decoders"),
    ],
)
def test_tasks_that_cannot_be_scored_are_refused(write_spec: Write, sections: Any, said: str) -> None:
    with pytest.raises(ArgosyError, match=said) as refused:
        resolve(write_spec(**{"eval": {"tasks": {"names": ["arc_easy"]}}} | sections))
    assert str(refused.value.key).startswith("eval.tasks")

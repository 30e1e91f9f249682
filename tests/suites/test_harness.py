"""`argosy eval --tasks`: scores are those of lm-evaluation-harness's own back end on the exported model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint.hf.hf_export import ExportOptions, export_hf
from argosy.config.resolve import resolve
from argosy.errors import ArgosyError
from argosy.infer.evaluate_tasks import evaluate_tasks, text_model
from argosy.infer.loading import load_model
from argosy.train.run import TrainOptions, train
from suites.local_tasks import NAMES, write_tasks

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "data-sets"))


@pytest.fixture
def run(write_spec: Write, tmp_path: Path) -> Path:
    path = write_spec(eval="off")
    train(resolve(path, ["train.steps=2", "train.precision=fp32", "optim.warmup=0"]), path, TrainOptions(quiet=True))
    return tmp_path / "runs" / "tiny"


def answers(model: Any, tasks: Any) -> dict[str, Any]:
    """The scores of the harness with one of its back ends."""
    return {name: one.as_dict() for name, one in tasks.score(model).items()}


def test_scores_are_those_of_the_hugging_face_back_end_on_the_exported_model(run: Path, tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    from argosy.suites.harness_model import HarnessModel
    from argosy.suites.harness_tasks import HarnessTasks

    directory = write_tasks(tmp_path / "tasks")
    export_hf(str(run), tmp_path / "hf", ExportOptions(verify=False))
    theirs = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=4)
    tasks = HarnessTasks(NAMES, directory=directory, shots=1)
    expected = answers(theirs, tasks)
    assert expected["colours"]["few_shot"] == 1
    assert {name: one["samples"] for name, one in expected.items()} == dict.fromkeys(NAMES, 9)
    for where in (str(run), f"hf:{tmp_path / 'hf'}"):
        ours = HarnessModel(text_model(load_model(where, device="cpu", precision="fp32")), batch=4)
        found = answers(ours, tasks)
        for name in NAMES:
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name
        # Not only the scores: every answer.
        for instance in tasks._loaded["tasks"]["writing"].instances:
            assert len(set(instance.resps)) == 1
    written = [instance.resps[0] for instance in tasks._loaded["tasks"]["writing"].instances]
    assert any(written)
    assert not any("e" in text for text in written)


def test_a_request_gets_the_same_answer_whatever_its_batch_and_rank(run: Path) -> None:
    from argosy.suites.harness_model import HarnessModel, RankShare

    text = text_model(load_model(str(run), device="cpu", precision="fp32"))
    requests = [(None, list(range(30 + n)), [n, n + 1][: 1 + n % 2]) for n in range(7)]
    alone = HarnessModel(text, batch=1)._loglikelihood_tokens(requests)

    parts: list[Any] = []
    # Two ranks, one after the other: the second sees what the first has gathered.
    for rank in range(2):
        share = RankShare(rank, 2, gather=lambda mine: (parts.append(mine), parts)[1])
        try:
            found = HarnessModel(text, batch=3, share=share)._loglikelihood_tokens(requests)
        except KeyError:
            assert rank == 0
    assert [greedy for _, greedy in found] == [greedy for _, greedy in alone]
    torch.testing.assert_close([value for value, _ in found], [value for value, _ in alone])
    # A continuation that fills the model is scored, and a longer one has no logits of its own.
    model, limit = HarnessModel(text, batch=2), text.limit
    assert len(model._loglikelihood_tokens([(None, [1], [2] * limit)])) == 1
    with pytest.raises(ArgosyError, match=f"has {limit + 1} tokens, and the model reads {limit}") as refused:
        model._loglikelihood_tokens([(None, [1], [2] * (limit + 1))])
    assert refused.value.code == "eval.bad-task"


def test_an_empty_context_is_the_prefix_token_in_every_batch(run: Path, tmp_path: Path) -> None:
    """The Hugging Face back end fails on a batch of empty contexts, so it is given the token as text."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from argosy.suites.harness_model import HarnessModel

    def written(model: Any, contexts: list[str]) -> list[str]:
        settings = {"until": ["zz"], "max_gen_toks": 6, "do_sample": False}
        requests = [Instance("generate_until", {}, (one, dict(settings)), n) for n, one in enumerate(contexts)]
        found: list[str] = model.generate_until(requests, disable_tqdm=True)
        return found

    text = text_model(load_model(str(run), device="cpu", precision="fp32"))
    assert text.opening == []
    export_hf(str(run), tmp_path / "hf", ExportOptions(verify=False))
    theirs = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=1)
    [expected] = written(theirs, [theirs.tokenizer.decode([theirs.prefix_token_id])])
    assert expected
    assert theirs.prefix_token_id == text.start
    for batch in (1, 2, 8):
        model = HarnessModel(text, batch=batch)
        assert written(model, ["", ""]) == [expected] * 2
        mixed = written(model, ["colour 1?", "", "colour of the sky", ""])
        assert mixed[1::2] == [expected] * 2
        assert mixed[::2] == written(theirs, ["colour 1?", "colour of the sky"])


def test_a_batch_that_fails_on_one_rank_is_refused_on_all() -> None:
    from argosy.suites.harness_model import RankShare

    def compute(batch: list[int]) -> list[int]:
        if batch == [1]:
            raise MemoryError("full")
        return batch

    parts: list[Any] = []
    # The second rank fails first, and the first rank has computed its batches.
    for rank in (1, 0):
        share = RankShare(rank, 2, gather=lambda mine: (parts.insert(0, mine), parts)[1])
        with pytest.raises(ArgosyError, match="MemoryError: full"):
            share.run([[0], [1], [2]], compute)
    assert parts == [[[(0, [0]), (2, [2])], None], [[], "MemoryError: full"]]
    # If ranks wait for each other in every pass, they learn of the failure after the same pass, and make no other.
    told: list[Any] = []
    share = RankShare(0, 2, gather=lambda mine: (told.append(mine), [mine, [True, "full"]])[1], in_step=True)
    with pytest.raises(ArgosyError, match="a batch failed on rank 1: full"):
        share.run([[0], [1], [2]], compute)
    assert told == [[True, None]]


def test_the_command_prints_and_writes_the_scores_of_several_ranks(run: Path, tmp_path: Path, argosy: Any) -> None:
    directory = write_tasks(tmp_path / "tasks")
    options = (
        "--task-dir",
        directory.relative_to(tmp_path),
        "--limit",
        4,
        "--device",
        "cpu",
        "--output",
        tmp_path / "scores.json",
    )
    environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    ranks = ("--nproc", 2, "--layout", "tp=2")
    shown = argosy("eval", run, "--tasks", "letters,perplexing", *ranks, *options, env=environment)
    assert shown.returncode == 0, shown.stderr
    names = ["letters", "perplexing"]
    alone, _ = evaluate_tasks(str(run), names, directory=directory, limit=4, device="cpu")
    written = json.loads((tmp_path / "scores.json").read_text())
    assert written["step"] == 2
    assert written["tasks"]["letters"]["samples"] == 4
    assert shown.stdout.count(f"{written['tasks']['perplexing']['word_perplexity']:.4f}") == 1
    for name in names:
        assert written["tasks"][name] == pytest.approx(alone[name].as_dict(), rel=1e-5)
    refused = argosy("eval", run, "--tasks", "letters", "--nproc", 2, "--layout", "tp=3", *options, env=environment)
    assert refused.returncode == 2
    assert "parallel.tp" in refused.stderr


def test_wrong_names_models_and_settings_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.tasks.manager

    directory = write_tasks(tmp_path / "tasks")
    # Reading the thousands of task files beside this module takes many seconds.
    monkeypatch.setattr(lm_eval.tasks.manager, "__file__", str(tmp_path / "few" / "manager.py"))
    write_tasks(tmp_path / "few")
    (directory / "colours.yaml").write_text(
        (directory / "colours.yaml").read_text().replace("rows.jsonl", "gone.jsonl")
    )
    for names, place, code in (
        (["colors"], None, "eval.unknown-task"),
        (["colours"], directory, "eval.bad-task"),
        (["letters"], tmp_path / "none", "data.not-found"),
    ):
        with pytest.raises(ArgosyError) as refused:
            evaluate_tasks(str(run), names, directory=place, device="cpu")
        assert refused.value.code == code
    path = directory / "writing.yaml"
    for old, new, said in (("9", "400", "leaves no room"), ("do_sample: false", "num_beams: 4", "num_beams")):
        text = path.read_text()
        path.write_text(text.replace(old, new))
        with pytest.raises(ArgosyError, match=said):
            evaluate_tasks(str(run), ["writing"], directory=directory, device="cpu")
        path.write_text(text)

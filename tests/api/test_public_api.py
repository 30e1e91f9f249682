"""The public Python API, used as a notebook would use it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import argosy
from argosy.data.corpus.indexed import IndexedReader
from argosy.data.open import open_data
from argosy.infer.generate import sample
from argosy.model.decoding import Sampling


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A finished run of a small GPT."""
    root = tmp_path_factory.mktemp("api")
    keys = {
        "name": "tiny",
        "runs_dir": root,
        "model": {
            "preset": "gpt2",
            "layers": 2,
            "hidden": 32,
            "heads": 2,
            "vocab_size": 257,
            "max_seq_len": 32,
            "dropout": 0.1,
        },
        "data": {"train": corpus, "seq_len": 32, "split": [90, 10, 0]},
        "train": {"global_batch": 4, "steps": 4, "device": "cpu"},
        "optim": {"lr": 1e-3, "warmup": 1},
        "eval": {"every": 2, "batches": 1},
        "log": {"every": 1},
    }
    trained = argosy.train_run(keys)
    assert trained.finished
    assert trained.step == 4
    return trained.directory


def test_importing_argosy_imports_neither_torch_nor_numpy() -> None:
    check = "import sys, argosy; assert argosy.__version__; print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_specs_and_plans_need_no_torch() -> None:
    check = (
        "import sys, argosy; argosy.plan_run('gpt2', cluster='8xH100', top=1); "
        "argosy.resolve_run; argosy.read_metrics; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_public_name_can_be_loaded_and_is_documented() -> None:
    for name in argosy.__all__:
        assert getattr(argosy, name) is not None
        if name != "__version__":
            assert getattr(argosy, name).__doc__, name
    assert set(argosy.__all__) <= set(dir(argosy))
    with pytest.raises(AttributeError, match="no attribute 'trian_run'"):
        argosy.trian_run  # noqa: B018


def test_the_page_about_python_names_everything_public() -> None:
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    assert [name for name in argosy.__all__ if not name.startswith("_") and f"`{name}" not in page] == []


def test_a_spec_is_the_same_from_a_file_and_from_a_dict(write_spec: Callable[..., Path]) -> None:
    import yaml

    path = write_spec()
    keys = yaml.safe_load(path.read_text())
    assert argosy.resolve_run(keys) == argosy.resolve_run(path) == argosy.resolve_run(str(path))
    changed = argosy.resolve_run(keys, {"train.steps": 7, "optim.lr": 2e-3, "data.split": [1, 1, 0]})
    assert (changed.train.steps, changed.optim.lr, changed.data.split) == (7, 2e-3, (1, 1, 0))
    assert keys["train"]["steps"] == 6  # the caller's dict is untouched


def test_an_override_keeps_its_python_type(write_spec: Callable[..., Path]) -> None:
    path = write_spec()
    spec = argosy.resolve_run(path, {"name": "1e3", "train.steps": np.int64(7), "data.split": np.array([3, 1, 0])})
    assert (spec.name, spec.train.steps, spec.data.split) == ("1e3", 7, (3, 1, 0))
    assert argosy.resolve_run(path, {"train.tokens": "20M"}).train.steps is None
    with pytest.raises(argosy.ArgosyError, match="more than once") as refused:
        argosy.resolve_run(path, {"train.tokens": "20M", "train.steps": 5})
    assert refused.value.origin == "override"


def test_a_wrong_key_in_a_dict_is_refused_as_one_in_a_file_is() -> None:
    with pytest.raises(argosy.ArgosyError, match="layres") as refused:
        argosy.resolve_run({"model": {"preset": "gpt2", "layres": 2}})
    assert "layers" in refused.value.fix


def test_a_plan_has_layouts_that_the_spec_takes() -> None:
    plan = argosy.plan_run("llama3-8b", cluster="8xH100", global_batch=64, tokens="1B", top=3)
    assert plan.gpus == 8
    assert len(plan.layouts) == 3
    best = plan.best
    assert best.fits
    assert best.memory_gib <= best.card_gib
    assert best.days is not None
    assert best.days > 0
    assert best.step_s == min(layout.step_s for layout in plan.layouts)
    assert "micro_batch" in best.parallel


def test_a_plan_is_the_same_for_a_file_and_for_its_keys(write_spec: Callable[..., Path]) -> None:
    import yaml

    path = write_spec()
    keys = yaml.safe_load(path.read_text())
    changed = {"train.tokens": "1B"}
    assert argosy.plan_run(keys, changed, cluster="2xH100", top=1) == argosy.plan_run(
        path, changed, cluster="2xH100", top=1
    )


def test_a_loaded_model_is_a_plain_module_that_writes_what_sample_writes(run: Path) -> None:
    model = argosy.load_model(run, device="cpu")
    logits = model(torch.zeros(2, 5, dtype=torch.int64))
    assert logits.shape == (2, 5, 257)
    assert not model.training
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    half = argosy.load_model(run, device="cpu", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    with pytest.raises(argosy.ArgosyError, match=r"not as torch\.int8"):
        argosy.load_model(run, dtype=torch.int8)


def test_a_generator_writes_what_sample_writes_without_loading_again(run: Path) -> None:
    options = Sampling(tokens=8, seed=3)
    said = argosy.generate_text(run, "ab", tokens=8, seed=3, device="cpu")
    assert said == sample(str(run), "ab", options, "cpu")
    generator = argosy.TextGenerator(run, device="cpu")
    for file in run.rglob("*.safetensors"):
        file.rename(file.with_suffix(".away"))
    try:
        assert generator.generate("ab", tokens=8, seed=3) == said
    finally:
        for file in run.rglob("*.away"):
            file.rename(file.with_suffix(".safetensors"))
    tokenizer = argosy.load_tokenizer(run)
    assert tokenizer.encode("ab") == [97, 98]
    assert tokenizer.decode([97, 98]) == "ab"


def test_a_corpus_is_a_dataset_of_its_documents(corpus: Path) -> None:
    documents = argosy.CorpusDataset(corpus)
    reader = IndexedReader(next(corpus.glob("*.idx")).with_suffix(""))
    assert len(documents) == reader.documents == 40
    for index in (0, 17, 39):
        assert documents[index].tolist() == reader.sequence(index).tolist()
    assert torch.equal(documents[-1], documents[39])
    assert documents.tokens == sum(len(document) for document in documents)
    with pytest.raises(IndexError):
        documents[40]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_data_loader_with_workers_reads_the_same(corpus: Path, context: str) -> None:
    documents = argosy.CorpusDataset(corpus)
    loader = DataLoader(documents, batch_size=None, num_workers=1, multiprocessing_context=context)
    assert all(torch.equal(one, documents[index]) for index, one in enumerate(loader))


def test_samples_are_those_the_run_is_trained_on(write_spec: Callable[..., Path]) -> None:
    path = write_spec()
    samples = argosy.SampleDataset(path)
    stream = open_data(argosy.resolve_run(path)).training()
    assert len(samples) == stream.epoch_samples
    batch = stream.batch(3, 4)
    for row in range(4):
        assert samples[3 + row]["tokens"].tolist() == batch.tokens[row].tolist()
        assert samples[3 + row]["labels"].tolist() == batch.labels[row].tolist()
    beyond = len(samples) + 5  # in the second epoch
    assert samples.read(beyond)["tokens"].tolist() == stream.batch(beyond, 1).tokens[0].tolist()
    assert sum(1 for _ in samples) == len(samples)
    with pytest.raises(IndexError):
        samples[len(samples)]
    held_out = argosy.SampleDataset(path, "validation")
    assert 0 < len(held_out) < len(samples)


def test_metrics_are_arrays_by_name(run: Path) -> None:
    metrics = argosy.read_metrics(run)
    assert metrics["step"].tolist() == [1, 2, 3, 4]
    assert np.isfinite(metrics["loss"]).all()
    steps, losses = metrics.at_values("validation_loss")
    assert steps.tolist() == [2, 4]
    assert np.isfinite(losses).all()
    assert "4 steps" in repr(metrics)
    with pytest.raises(KeyError):
        metrics["no such metric"]
    with pytest.raises(argosy.ArgosyError, match="no metrics"):
        argosy.read_metrics(run.parent / "nothing")


def test_a_step_without_a_value_has_nan(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None, "note": "x"}, {"step": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = argosy.read_metrics(tmp_path)
    assert list(metrics) == ["step", "loss"]
    assert metrics["loss"][0] == 2.0
    assert np.isnan(metrics["loss"][1:]).all()


def test_a_callback_sees_every_record_and_can_stop_a_run_that_then_goes_on(write_spec: Callable[..., Path]) -> None:
    path = write_spec()
    whole: list[dict[str, Any]] = []
    reference = argosy.train_run(path, {"name": "whole"}, on_record=lambda record: whole.append(dict(record)))
    assert reference.finished
    assert [record["step"] for record in whole] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert [record["step"] for record in whole if "validation_loss" in record] == [3, 6]

    stopped = argosy.train_run(path, on_record=lambda record: record["step"] < 4)
    assert (stopped.finished, stopped.step) == (False, 4)
    resumed = argosy.train_run(path)
    assert (resumed.finished, resumed.step) == (True, 6)
    assert resumed.metrics()["loss"].tolist() == reference.metrics()["loss"].tolist()


def test_an_error_in_a_callback_reaches_the_caller(write_spec: Callable[..., Path]) -> None:
    def fail(record: Mapping[str, Any]) -> None:
        raise ZeroDivisionError("the callback's own")

    with pytest.raises(ZeroDivisionError, match="own"):
        argosy.train_run(write_spec(), on_record=fail)


def test_a_callback_stops_a_run_outside_the_main_thread_too(write_spec: Callable[..., Path]) -> None:
    path = write_spec()
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(argosy.train_run, path, on_record=lambda record: record["step"] < 2).result()
    assert (stopped.finished, stopped.step) == (False, 2)
    with pytest.raises(argosy.ArgosyError, match="already holds a run"):
        argosy.train_run(path, {"train.steps": 3}, fresh=True)
    again = argosy.train_run(path, {"train.steps": 3}, fresh=True, archive=True)
    assert (again.finished, again.step) == (True, 3)

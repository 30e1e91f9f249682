"""`argosy init`: a run spec for this machine and a corpus that trains as it is written."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.config.counts import count_parameters
from argosy.config.resolve import resolve
from argosy.data.corpus.corpus import open_corpus
from argosy.errors import EXIT_DONE, ArgosyError
from argosy.plan.first_spec import ThisMachine, first_spec
from argosy.plan.this_machine import local_gpus
from argosy.train.run import TrainOptions, train
from data.corpora import write_corpus

Run = Callable[..., "subprocess.CompletedProcess[str]"]
LAPTOP = ThisMachine(1, "4 CPU cores", 6e10, 8e9, 1200.0)
NODE = ThisMachine(8, "NVIDIA H100", 8 * 3e14, 8 * 80e9, 8 * 3600.0)


def test_what_it_writes_trains_as_written(argosy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "my corpus", [[[list(range(97, 122))]] * 40])
    written = argosy("init", "my corpus", "--name", "mine")
    assert written.returncode == 0, written.stderr
    monkeypatch.chdir(tmp_path)
    path = Path("run.yaml")
    assert train(resolve(path), path, TrainOptions(quiet=True)) == EXIT_DONE
    listed = argosy("ls").stdout.splitlines()
    assert listed[0].split() == ["name", "state", "step", "loss", "validation", "params", "disk", "age"]
    assert listed[1].split()[:3] == ["mine", "done", "20/20"]
    again = argosy("init", "my corpus")
    assert again.returncode == 2
    assert "run.yaml exists already" in again.stderr


def spec_of(text: str, tmp_path: Path) -> tuple[int, int, int]:
    """Return parameters, global batch and tokens of the run."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    spec = resolve(path).spec
    assert spec.train.steps is not None
    tokens = spec.train.steps * spec.train.global_batch * spec.data.seq_len
    return count_parameters(spec.model).total, spec.train.global_batch, tokens


def test_a_larger_machine_gets_a_larger_model_and_no_corpus_is_read_too_often(corpus: Path, tmp_path: Path) -> None:
    small, _, _ = spec_of(first_spec(None, "a", LAPTOP).text, tmp_path)
    large, batch, tokens = spec_of(first_spec(None, "a", NODE).text, tmp_path)
    assert small <= large
    assert batch % 8 == 0
    assert tokens <= 4.2 * 10_000_000
    few, _, _ = spec_of(first_spec(corpus, "a", NODE).text, tmp_path)
    assert few < large, "the corpus is small, whatever the machine"


def test_one_document_is_trained_on_without_evaluation(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "one", [[[list(range(97, 122)) * 8]]])
    path = tmp_path / "run.yaml"
    path.write_text(first_spec(corpus, "a", LAPTOP).text)
    assert resolve(path).spec.eval is None
    assert "the corpus is one document" in "\n".join(first_spec(corpus, "a", LAPTOP).notes)


def test_a_validation_corpus_is_named_instead_of_a_share(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(first_spec(corpus, "a", LAPTOP, corpus).text)
    spec = resolve(path).spec
    assert [source.path for source in spec.data.validation] == [str(corpus)]
    assert spec.data.split[1] == 0
    assert spec.eval is not None


def test_epochs_are_those_of_the_training_share(corpus: Path, tmp_path: Path) -> None:
    written = first_spec(corpus, "a", LAPTOP).text
    [share] = re.findall(r"split: \[(\d+), (\d+), 0\]", written)
    _, _, tokens = spec_of(written, tmp_path)
    trained = open_corpus(corpus).split((*map(float, share), 0))["train"].tokens
    [epochs] = re.findall(r"([\d.]+) epochs", written)
    assert float(epochs) == pytest.approx(tokens / trained, rel=0.05)


def test_text_that_is_not_prepared_is_refused_with_the_commands(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    with pytest.raises(ArgosyError) as refused:
        first_spec(tmp_path / "texts", "a", LAPTOP)
    assert "argosy data prepare" in refused.value.fix


def test_gpus_are_found_without_torch(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   1\n")
    assert local_gpus({}, tmp_path) == ["NVIDIA H200"] * 2
    assert local_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == ["NVIDIA H200"]
    assert local_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []

"""What a new user types by habit gets the command or key that it means."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.config.resolve import resolve
from argosy.data.text.inputs import find_inputs
from argosy.errors import ArgosyError

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Write = Callable[..., Path]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("launch", "argosy launch RUN.yaml"),
        ("export runs/a", "`argosy ckpt export`"),
        ("generate runs/a", "`argosy sample`"),
        ("verify corpus", "`argosy data verify` or `argosy ckpt verify`"),
        ("train run.yaml --lr 3", "optim.lr=3"),
        ("train run.yaml --max-iters=100", "train.steps=100"),
        ("plan gpt2 --tp 2", "--what-if tp=2"),
    ],
)
def test_a_wrong_command_is_refused_with_the_right_one(words: str, hint: str, argosy: Run) -> None:
    result = argosy(*words.split())
    assert result.returncode == 2
    assert hint in result.stderr


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("optim.rl=3", "optim.lr"),
        ("optm.lrr=3", "optim.lr"),
        ("evl.every=3", "eval.every"),
        ("train.stpes=3", "train.steps"),
        ("cluster.target=kubernetes", "jobset (JobSet)"),
        ("cluster.target=sagemaker", "hyperpod"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_the_right_one(override: str, hint: str, write_spec: Write) -> None:
    with pytest.raises(ArgosyError) as refused:
        resolve(write_spec(), [override])
    assert hint in refused.value.fix


@pytest.mark.parametrize(
    ("words", "usage", "error"),
    [
        ("train --lr 3", "[OPTIONS] [RUN.yaml] [KEY=VALUE]...", "given without dashes: optim.lr=3"),
        ("data prepare a.txt", "[OPTIONS] INPUTS...", "Missing option '--tokenizer'. tokenizer.json, SentencePiece"),
        ("plan", "[OPTIONS] MODEL|RUN.yaml [KEY=VALUE]...", "Missing argument 'MODEL|RUN.yaml'. A preset"),
    ],
)
def test_a_usage_error_shows_what_belongs_there_and_what_is_missing(
    words: str, usage: str, error: str, argosy: Run
) -> None:
    said = argosy(*words.split()).stderr
    assert said.splitlines()[0].endswith(usage)
    assert error in said
    assert "--help)" not in said


def test_directories_that_an_output_needs_are_named_when_they_are_made(argosy: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    prepare = ("data", "prepare", "a.txt", "--tokenizer", "bytes", "--output", "deep/down/corpus")
    assert "made the directory" not in argosy(*prepare, "--dry-run").stderr
    assert "made the directory deep, which was not there" in argosy(*prepare).stderr
    assert "made the directory" not in argosy(*prepare, "--overwrite").stderr


def test_other_text_files_are_read_when_asked_and_others_never(tmp_path: Path) -> None:
    for name, content in {"a.md": b"# A", "b.py": "é = 1".encode(), "c.png": b"\x89PNG\0", "d.txt": b"d"}.items():
        (tmp_path / name).write_bytes(content)
    assert [Path(file.path).name for file in find_inputs([str(tmp_path)])] == ["d.txt"]
    found = find_inputs([str(tmp_path)], as_text=True)
    assert [(Path(file.path).name, file.is_text) for file in found] == [("a.md", True), ("b.py", True), ("d.txt", True)]
    with pytest.raises(ArgosyError) as refused:
        find_inputs([str(tmp_path / "a.md")])
    assert "--as text" in refused.value.fix


def test_markdown_becomes_a_corpus(argosy: Run, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A title\n")
    result = argosy("data", "prepare", "a.md", "--as", "text", "--tokenizer", "bytes", "--output", "corpus")
    assert result.returncode == 0, result.stderr
    assert "1 documents, 11 tokens" in result.stdout

"""Samples of text while training (`log.samples`): written for people, and of no consequence to the training numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint.source import known_rows
from argosy.checkpoint.store import latest
from argosy.config.resolve import resolve, resolve_model
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.errors import ArgosyError
from argosy.infer.generate import sample
from argosy.model import decoding
from argosy.model.decoding import Sampling
from argosy.record.jsonl import read_jsonl
from argosy.train.run import TrainOptions, train

Write = Callable[..., Path]
decoding_choose = decoding.choose  # a test puts another function in its place
MOE = {
    "family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab_size": 257, "dropout": 0.1,
    "moe": {"experts": 4, "top_k": 2, "ffn": 16, "bias_rate": 0.01},
}  # fmt: skip
PROMPTS = {"every": 2, "prompts": ["some words", ""], "tokens": 5}


def go(path: Path, *overrides: str) -> Any:
    resolved = resolve(path, overrides)
    train(resolved, path, TrainOptions(quiet=True))
    checkpoint = latest(Path(resolved.spec.runs_dir) / resolved.spec.name / "checkpoints", print)
    assert checkpoint is not None
    return checkpoint.weights()


def test_samples_change_no_bit_of_the_training_and_are_those_of_the_checkpoint(
    write_spec: Write, tmp_path: Path
) -> None:
    """The model has dropout and experts with balancing biases, whose state a stray forward pass would change."""
    with_samples = go(write_spec(model=MOE, log={"every": 1, "samples": PROMPTS}, name="with"), "train.steps=5")
    without = go(write_spec(model=MOE, name="without"), "train.steps=5")
    assert all(torch.equal(with_samples[name], without[name]) for name in without.infos)
    lines = list(read_jsonl(tmp_path / "runs" / "with" / "samples.jsonl"))
    assert [(line["step"], line["prompt"]) for line in lines] == [(n, p) for n in (2, 4, 5) for p in ("some words", "")]
    assert [line["tokens"] for line in lines[::2]] == [2 * 8 * 32, 4 * 8 * 32, 5 * 8 * 32]
    assert all(isinstance(line["time"], float) for line in lines)
    # The newest are what `argosy sample` writes with the last checkpoint.
    for line in lines[-2:]:
        assert line["text"] == sample(str(tmp_path / "runs" / "with"), line["prompt"], Sampling(5))


def test_padding_of_the_vocabulary_is_never_drawn(
    write_spec: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def choose(*arguments: Any) -> list[int]:
        drawn.extend(tokens := decoding_choose(*arguments))
        return tokens

    monkeypatch.setattr(decoding, "choose", choose)
    samples = PROMPTS | {"every": 9, "tokens": 40, "temperature": 1.0, "top_k": 0}
    # The tokenizer is of bytes, with 257 ids. Rows beyond them have three quarters of an untrained model's probability.
    go(
        write_spec(model=MOE | {"vocab_size": 1003}, log={"every": 1, "samples": samples}, name="padded"),
        "train.steps=5",
    )
    assert len(drawn) == 2 * 40
    sample(str(tmp_path / "runs" / "padded"), "some words", Sampling(40, temperature=1.0, top_k=0))
    assert len(drawn) > 2 * 40
    assert max(drawn) < 257


@pytest.mark.parametrize(
    ("inherited", "eod_id", "rows"), [(0, 256, 257), (0, 300, 301), (400, None, 400), (2000, 256, 1003)]
)
def test_an_end_after_the_tokenizer_s_ids_and_rows_of_the_model_before_are_no_padding(
    inherited: int, eod_id: int | None, rows: int
) -> None:
    model = resolve_model(MOE | {"vocab_size": 1003, "max_seq_len": 32})
    assert known_rows(model, ByteTokenizer(), inherited, eod_id) == rows


def test_a_model_that_cannot_continue_a_text_is_refused(write_spec: Write) -> None:
    bert = {"model": {"preset": "bert-base", "vocab_size": 300}, "data": {"train": "x", "seq_len": 32}}
    with pytest.raises(ArgosyError, match="only decoders") as refused:
        resolve(write_spec(**bert, log={"samples": PROMPTS}))
    assert refused.value.key == "log.samples"

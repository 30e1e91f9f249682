"""A prompt for a chat model names its special tokens, and a prompt for a pretrained one is plain text."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.checkpoint.source import Source
from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.data.chat.chat_template import chat_format
from argosy.data.open import open_data
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.text.tokenizer import load_tokenizer
from argosy.infer.generate import source_tokenizer
from chat_files import write_chats, write_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chat")
    tokenizer = write_tokenizer(root / "tokenizer")
    options = PrepareOptions(chat=chat_format(str(tokenizer)), workers=1)
    source = str(write_chats(root / "chats.jsonl", 3))
    prepare([source], load_tokenizer(str(tokenizer), special_in_text=True), root / "corpus", options)
    return root


def run_of(directory: Path, task: str) -> RunSpec:
    keys = ["model.preset=llama3-8b", "model.layers=1", "model.vocab_size=302", f"data.task={task}", "data.seq_len=32"]
    more = [f"data.train={directory / 'corpus'}", "train.global_batch=1", "train.steps=1", "optim.lr=1", "eval=off"]
    return resolve(None, [*keys, *more]).spec


def source_of(directory: Path, spec: RunSpec, *, ours: bool) -> Source:
    run = spec.model_dump(mode="json") if ours else None
    return Source(
        "", spec.model, {}, lambda name: pytest.fail(name), directory / "tokenizer", None, 302, None, {}, run=run
    )


@pytest.mark.parametrize(
    ("task", "special"), [("sft", True), ("dpo", True), ("causal-lm", False), ("prefix-lm", False)]
)
def test_special_tokens_of_a_prompt_are_read_as_tokens_after_chat_tuning_only(
    directory: Path, task: str, special: bool
) -> None:
    spec = run_of(directory, task)
    prompt = "<|im_start|>user\nHi<|im_end|>\n"
    plain = load_tokenizer(str(directory / "tokenizer"))
    begins = plain.id_of("<|im_start|>")
    for tokenizer in (
        # log.samples and scores during training; `sample`, TextGenerator and `eval`.
        open_data(spec).require_tokenizer("log.samples"),
        source_tokenizer(source_of(directory, spec, ours=True)),
    ):
        found = tokenizer.encode(prompt)
        assert found[0] == begins if special else found == plain.encode(prompt)
    elsewhere = source_tokenizer(source_of(directory, spec, ours=False))
    assert elsewhere.encode(prompt)[0] == begins

"""Supervised fine-tuning: conversations packed into samples, loss on the assistant's turns, resumed with the same bits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.resolve import Resolved, resolve
from argosy.data.build_corpora import Share, build
from argosy.data.chat.chat_template import chat_format
from argosy.data.open import open_data
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.samples.conversations import ConversationRows, read_conversation
from argosy.data.samples.masks import IGNORED
from argosy.data.samples.packing import pack
from argosy.data.text.tokenizer import load_tokenizer
from argosy.errors import ArgosyError
from argosy.train.run import TrainOptions, train
from chat_files import write_chats, write_tokenizer
from tiny import TINY_MODEL

SEQ = 96


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sft")
    directory = write_tokenizer(root / "tokenizer")
    write_chats(root / "chats.jsonl", 24)
    tokenizer = load_tokenizer(str(directory), special_in_text=True)
    options = PrepareOptions(chat=chat_format(str(directory)), workers=1)
    prepare([str(root / "chats.jsonl")], tokenizer, root / "corpus", options)
    return root / "corpus"


def run_of(corpus: Path, *keys: str) -> Resolved:
    model = {**TINY_MODEL, "vocab_size": 302}
    return resolve(
        None,
        [
            f"model={yaml.safe_dump(model, default_flow_style=True).strip()}", f"data.train={corpus}", f"data.seq_len={SEQ}",
            "data.task=sft", "data.split=[1,0,0]", "eval=off", "train.global_batch=2", "train.epochs=2", "optim.lr=1e-3", *keys,
        ],
    )  # fmt: skip


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(0, 5))
def test_packing_puts_every_document_into_one_row_that_has_room(lengths: list[int], seed: int) -> None:
    documents, starts = pack(np.array(lengths, np.int64), 20, seed)
    assert sorted(documents) == list(range(len(lengths)))
    filled = [sum(lengths[d] for d in documents[a:b]) for a, b in pairwise(starts)]
    assert all(0 < room <= 20 for room in filled)
    # Two rows that would fit into one are never left.
    assert sum(room <= 10 for room in filled) <= 1


def test_a_sample_is_whole_conversations_that_do_not_see_each_other(chats: Path) -> None:
    stream = open_data(run_of(chats).spec).training()
    [rows] = stream.sets
    assert isinstance(rows, ConversationRows)
    corpus = rows.corpus
    assert stream.epoch_samples < corpus.documents
    seen: list[int] = []
    for index in range(stream.epoch_samples):
        batch = stream.batch(index, 1)
        row = int(rows.rows_of(np.array([index]))[0])
        at = 0
        for place, document in enumerate(rows.conversations(row)):
            text, learnt = read_conversation(corpus, int(document), SEQ)
            here = slice(at, at + len(text))
            np.testing.assert_array_equal(batch.tokens[0, here], text)
            np.testing.assert_array_equal(batch.inputs["documents"][0, here], place)
            np.testing.assert_array_equal(batch.inputs["positions"][0, here], np.arange(len(text)))
            # The label of a token is the next one, if that is learnt; the last token has none.
            expected = np.append(np.where(learnt, text, IGNORED)[1:], IGNORED)
            np.testing.assert_array_equal(batch.labels[0, here], expected)
            at += len(text)
            seen.append(int(document))
        assert (batch.labels[0, at:] == IGNORED).all()
        assert batch.valid_tokens
    assert sorted(seen) == list(range(corpus.documents))
    again = open_data(run_of(chats).spec).training().batch(3, 4)
    np.testing.assert_array_equal(again.tokens[1], stream.batch(4, 1).tokens[0])


def test_a_conversation_without_an_answer_in_reach_is_left_out(chats: Path) -> None:
    short = run_of(chats, "data.seq_len=24", "data.sft.packing=false")
    rows: Any = open_data(short.spec).training().sets[0]
    assert 0 < rows.count < rows.corpus.documents
    for index in range(rows.count):
        assert rows.batch(np.array([index])).valid_tokens


def test_texts_are_not_taken_for_conversations(corpus: Path) -> None:
    with pytest.raises(ArgosyError, match="holds texts") as refused:
        open_data(run_of(corpus).spec).training()
    assert refused.value.code == "data.wrong-task"


def test_the_corpus_of_a_recipe_is_made_for_the_task_of_the_run(chats: Path, tmp_path: Path) -> None:
    root = chats.parent
    source = f"[{{path: {tmp_path / 'made'}, prepare: {{inputs: [{root / 'chats.jsonl'}]}}}}]"
    run = run_of(chats, f"data.train={source}", f"data.tokenizer={root / 'tokenizer'}")
    assert list(build(run.spec, Share()))
    for name in ("shard-00000.bin", "shard-00000.idx"):
        assert (tmp_path / "made" / name).read_bytes() == (chats / name).read_bytes()


def test_a_resumed_run_has_the_same_bits(chats: Path, tmp_path: Path) -> None:
    def ended(name: str, *stops: int) -> dict[str, bytes]:
        for steps in stops:
            run = run_of(
                chats, f"name={name}", f"runs_dir={tmp_path}", "train.epochs=null", f"train.steps={steps}", "optim.schedule=constant",
                "checkpoint.mode=sync",
            )  # fmt: skip
            assert train(run, None, TrainOptions(quiet=True)) == 0
        last = sorted((tmp_path / name / "checkpoints").glob("step-*"))[-1]
        return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}

    assert ended("whole", 6) == ended("cut", 2, 6)

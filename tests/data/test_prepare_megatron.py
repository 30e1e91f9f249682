"""The pairs that `prepare` writes equal those of Megatron's own preprocessing, byte for byte.

Megatron's side is its builder, fed as its tool feeds it: a line is a document under each key; each sentence with tokens is a
sequence; the end-of-document id is added to the last sequence of a document; the vocabulary size determines the dtype.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from argosy.data.corpus.indexed import IndexedReader
from argosy.data.prepare import part_runner
from argosy.data.prepare import work as preparing
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions, corpora_of
from argosy.data.text.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, train_bpe


def _tokenizer(entries: int) -> JsonTokenizer:
    """Train a BPE, and pad it to a number of entries."""
    document = json.loads(train_bpe(["one word and another, and é more: 12 of them\n"] * 40, 400))
    vocabulary = document["model"]["vocab"]
    vocabulary |= {f"filler {i}": i for i in range(len(vocabulary), entries)}
    return JsonTokenizer(json.dumps(document), "t")


TOKENIZERS = {"uint16": _tokenizer(400), "int32": _tokenizer(65_500), "bytes": ByteTokenizer()}

text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=60)
value = st.one_of(text.filter(str.strip), st.lists(text, max_size=4).filter(lambda texts: any(map(str.strip, texts))))


def megatrons(prefix: Path, values: Sequence[Any], tokenizer: Tokenizer, *, append_eod: bool) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    for value in values:
        ids: list[int] = []
        lengths: list[int] = []
        for sentence in value if isinstance(value, list) else [value]:
            found = tokenizer.encode(sentence)
            if found:
                ids += found
                lengths.append(len(found))
        if ids and append_eod:
            ids.append(tokenizer.eod_id)
            lengths[-1] += 1
        builder.add_document(torch.tensor(ids), lengths)
    builder.finalize(f"{prefix}.idx")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(value, value), min_size=1, max_size=20), st.booleans(), st.sampled_from(list(TOKENIZERS)))
@pytest.mark.parametrize("keys", [("text",), ("title", "meta.text")])
def test_the_bytes_are_megatrons(
    keys: tuple[str, ...], rows: list[tuple[Any, Any]], append_eod: bool, kind: str
) -> None:
    tokenizer = TOKENIZERS[kind]
    with tempfile.TemporaryDirectory() as root:
        source, out = Path(root) / "x.jsonl", Path(root) / "out"
        records = [{"text": a, "title": a, "meta": {"text": b}} for a, b in rows]
        source.write_text(
            "".join(json.dumps(record, ensure_ascii=i % 2 == 0) + "\n" for i, record in enumerate(records))
        )
        made = prepare([str(source)], tokenizer, out, PrepareOptions(keys=keys, append_eod=append_eod))
        assert made is not None
        for number, corpus in enumerate(corpora_of(out, keys)):
            theirs = Path(root) / f"theirs-{number}"
            megatrons(theirs, [row[number] for row in rows], tokenizer, append_eod=append_eod)
            for suffix in (".bin", ".idx"):
                assert (corpus / f"shard-00000{suffix}").read_bytes() == theirs.with_suffix(suffix).read_bytes()
            assert made[corpus].dtype == ("int32" if kind == "int32" else "uint16")


def test_workers_and_a_fast_engine_write_megatrons_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, several files and two processes give the bytes of one process that reads line by line."""
    monkeypatch.setattr(preparing, "block_size", lambda files: 1 << 16)
    monkeypatch.setattr(part_runner, "_INLINE_BYTES", 1 << 16)
    texts = [f"document {i}: one word and another, é {'more ' * (i % 90)}" for i in range(3000)]
    for number in range(3):
        lines = [json.dumps({"text": text}) for text in texts[number * 1000 : (number + 1) * 1000]]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    prepare([str(tmp_path)], TOKENIZERS["uint16"], tmp_path / "out", PrepareOptions(workers=2))
    megatrons(tmp_path / "theirs", texts, TOKENIZERS["uint16"], append_eod=True)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out/shard-00000{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_each_reads_what_the_other_writes(tmp_path: Path) -> None:
    values = ["one", ["two", "and three"], "four"]
    tokenizer = TOKENIZERS["int32"]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    prepare([str(tmp_path / "x.jsonl")], tokenizer, tmp_path / "out", PrepareOptions())
    megatrons(tmp_path / "theirs", values, tokenizer, append_eod=True)
    theirs, ours = IndexedDataset(str(tmp_path / "out" / "shard-00000")), IndexedReader(tmp_path / "theirs")
    assert theirs.document_indices.tolist() == ours.document_indices.tolist() == [0, 1, 3, 4]
    assert [theirs[i].tolist() for i in range(4)] == [ours.sequence(i).tolist() for i in range(4)]

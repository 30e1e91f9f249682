"""`.bin/.idx` files equal Megatron's own, byte for byte, and a damaged file is refused before it is used."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.corpus.indexed import IndexedReader, IndexedWriter, bin_path, dtype_for, idx_path
from argosy.errors import ArgosyError

# Documents of sequences of token ids.
DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 65000), min_size=1, max_size=9), min_size=1, max_size=3), min_size=1, max_size=12
)


def write(prefix: Path, documents: list[list[list[int]]], vocab_size: int = 50257) -> None:
    writer = IndexedWriter(prefix, dtype_for(vocab_size))
    for document in documents:
        writer.add_document([np.array(sequence) for sequence in document])
    writer.finish()


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS, st.sampled_from([50257, 128256]))
def test_megatron_reads_what_we_write_and_writes_the_same_bytes(
    documents: list[list[list[int]]], vocab_size: int
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    with tempfile.TemporaryDirectory() as root:
        ours, theirs = Path(root) / "ours", Path(root) / "theirs"
        write(ours, documents, vocab_size)
        builder = IndexedDatasetBuilder(str(bin_path(theirs)), dtype=dtype_for(vocab_size).type)
        for document in documents:
            tokens = torch.tensor([token for sequence in document for token in sequence])
            builder.add_document(tokens, [len(sequence) for sequence in document])
        builder.finalize(str(idx_path(theirs)))

        assert bin_path(ours).read_bytes() == bin_path(theirs).read_bytes()
        assert idx_path(ours).read_bytes() == idx_path(theirs).read_bytes()
        sequences = [sequence for document in documents for sequence in document]
        read_by_megatron = IndexedDataset(str(ours))
        assert [list(map(int, read_by_megatron[i])) for i in range(len(read_by_megatron))] == sequences
        read_by_us = IndexedReader(theirs)
        assert [list(map(int, read_by_us.sequence(i))) for i in range(read_by_us.sequences)] == sequences
        assert read_by_us.documents == len(documents)
        flat = [token for sequence in sequences for token in sequence]
        assert list(map(int, read_by_us.read(1, len(flat) - 1))) == flat[1:]
        read_by_us.close()


def test_token_positions_of_documents(tmp_path: Path) -> None:
    write(tmp_path / "x", [[[1, 2], [3]], [[4]], [[5, 6, 7]]])
    reader = IndexedReader(tmp_path / "x")
    assert [reader.token_at_document(d) for d in range(4)] == [0, 3, 4, 7]


def test_megatrons_choice_of_token_size() -> None:
    assert [dtype_for(v).itemsize for v in (257, 65499, 65500, 128256)] == [2, 2, 4, 4]


def test_a_pair_appears_only_when_finished(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "x", dtype_for(300))
    writer.add_document([np.array([1, 2, 3])])
    assert not bin_path(tmp_path / "x").exists()
    assert not idx_path(tmp_path / "x").exists()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda i, b: i.unlink(), "no file"),
        (lambda i, b: b.unlink(), "cannot be opened"),
        (lambda i, b: i.write_bytes(b""), "header"),
        (lambda i, b: i.write_bytes(i.read_bytes()[:20]), "header"),
        (lambda i, b: i.write_bytes(i.read_bytes()[:-8]), "truncated"),
        (lambda i, b: i.write_bytes(i.read_bytes() + b"x"), "bytes"),
        (lambda i, b: i.write_bytes(b"X" + i.read_bytes()[1:]), "magic"),
        (lambda i, b: i.write_bytes(i.read_bytes()[:9] + b"\x02" + i.read_bytes()[10:]), "version"),
        (lambda i, b: i.write_bytes(i.read_bytes()[:17] + b"\x63" + i.read_bytes()[18:]), "dtype code 99"),
        (lambda i, b: i.write_bytes(i.read_bytes()[:-8] + (99).to_bytes(8, "little")), "documents end"),
        (lambda i, b: i.write_bytes(i.read_bytes()[:17] + b"\x06" + i.read_bytes()[18:]), "token ids"),
        (lambda i, b: _poke(i, 34, (-1).to_bytes(4, "little", signed=True)), "-1 tokens"),
        (lambda i, b: _poke(i, 34, (2).to_bytes(4, "little")), "offsets|bytes"),
        (lambda i, b: _poke(i, 34 + 8 + 8, (77).to_bytes(8, "little")), "offsets|bytes"),
        (lambda i, b: _poke(i, 34 + 24, (5).to_bytes(8, "little")), "rise from 0"),
        (lambda i, b: _poke(i, 34 + 24 + 8, (2**60).to_bytes(8, "little")), "rise from 0"),
        (lambda i, b: _poke(i, 18, (2**60).to_bytes(8, "little")), "need"),
        (lambda i, b: b.write_bytes(b.read_bytes()[:-2]), "bytes"),
        (lambda i, b: b.write_bytes(b.read_bytes() + b"xx"), "bytes"),
    ],
)
def test_a_damaged_pair_is_refused_with_the_numbers(tmp_path: Path, damage, words: str) -> None:  # type: ignore[no-untyped-def]
    prefix = tmp_path / "x"
    write(prefix, [[[1, 2, 3]], [[4]]])
    damage(idx_path(prefix), bin_path(prefix))
    with pytest.raises(ArgosyError, match=words) as refusal:
        IndexedReader(prefix)
    assert refusal.value.code in ("data.bad-index", "data.not-found")


def test_a_file_cut_while_in_use_is_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    write(prefix, [[list(range(100))]])
    reader = IndexedReader(prefix)
    bin_path(prefix).write_bytes(b"")
    with pytest.raises(ArgosyError) as refusal:
        reader.read(10, 10)
    assert refusal.value.code == "data.truncated"


def _poke(path: Path, at: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)


@pytest.mark.parametrize("ids", [[70000], [-1]])
def test_ids_that_do_not_fit_are_refused_not_wrapped(tmp_path: Path, ids: list[int]) -> None:
    writer = IndexedWriter(tmp_path / "x", dtype_for(300))
    with pytest.raises(ArgosyError) as refusal:
        writer.add_document([np.array(ids)])
    assert refusal.value.code == "tokenizer.vocabulary"
    writer.abandon()

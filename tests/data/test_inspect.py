"""`inspect`: figures match the files, sampled figures say so, and untrusted text cannot control a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from corpora import text_document, write_corpus, write_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from argosy.cli import data_corpus
from argosy.data.corpus import lengths as lengths_module
from argosy.data.corpus.corpus import open_corpus
from argosy.data.corpus.duplicates import estimate_duplicates
from argosy.data.corpus.inspect import inspect, printable
from argosy.data.corpus.lengths import LengthCounts, count_lengths, draw
from argosy.errors import ArgosyError


def test_counts_are_those_of_the_files(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "c", [[text_document("abc"), [[]], [[1, 2], [3]]], [text_document("z" * 99)]])
    facts = inspect(path)
    assert (facts.shards, facts.documents, facts.empty_documents, facts.sequences) == (2, 4, 1, 4)
    assert (facts.tokens, facts.bytes, facts.dtype) == (4 + 3 + 100, 214, "uint16")
    assert (facts.shortest, facts.longest, facts.percentiles["p50"]) == (0, 100, 3)
    assert (facts.vocabulary.smallest, facts.vocabulary.largest, facts.vocabulary.distinct) == (1, 256, 8)
    assert facts.vocabulary.sampled_tokens == facts.tokens
    assert facts.vocabulary.tokenizer_size == 257


def test_a_bare_pair_needs_no_manifest_and_decodes_with_a_given_tokenizer(tmp_path: Path) -> None:
    write_pair(tmp_path / "x", [text_document("hello"), text_document("world")])
    for name in ("x", "x.bin", "x.idx"):
        facts = inspect(tmp_path / name)
        assert (facts.has_manifest, facts.documents, facts.shown) == (False, 2, [])
    shown = inspect(tmp_path / "x", tokenizer="bytes", show=2).shown
    assert [(s.document, s.tokens, s.text) for s in shown] == [(0, 6, "hello"), (1, 6, "world")]


def test_documents_are_shown_with_the_stored_tokenizer_from_every_part(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "c", [[text_document(f"{s}-{i}") for i in range(3)] for s in "abc"])
    assert [shown.text for shown in inspect(path, show=3).shown] == ["a-0", "b-1", "c-2"]
    assert inspect(path, show=0).shown == []


def test_another_tokenizer_than_the_corpus_was_made_with_is_refused(tmp_path: Path) -> None:
    from argosy.data.text.tokenizer import train_bpe

    (tmp_path / "other.json").write_text(train_bpe(["some words"] * 9, 300))
    path = write_corpus(tmp_path / "c", [[text_document("abc")]])
    with pytest.raises(ArgosyError) as refusal:
        inspect(path, tokenizer=str(tmp_path / "other.json"))
    assert refusal.value.code == "tokenizer.mismatch"


def test_control_characters_of_documents_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "c", [[text_document("red \x1b[31m bell \x07 é\n")]])
    text = inspect(path).describe()
    assert "\x1b" not in text
    assert "\x07" not in text
    assert printable("a\x1bé\n") == "a\\x1bé\\n"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=80), st.floats(0, 100))
def test_percentiles_and_histogram_count_every_document(lengths: list[int], percent: float) -> None:
    values, counts = np.unique(lengths, return_counts=True)
    found = LengthCounts(values, counts)
    at = found.percentile(percent)
    assert sum(length <= at for length in lengths) >= percent / 100 * len(lengths) - 1e-9
    assert at in lengths
    assert sum(bin.documents for bin in found.histogram()) == len(lengths)
    for bin in found.histogram():
        assert bin.documents == sum(bin.low <= length <= bin.high for length in lengths)
    assert len(draw(found.histogram()).splitlines()) == len(found.histogram())


def test_lengths_counted_in_blocks_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    documents = [[[1] * int(n) for n in rng.integers(0, 5, rng.integers(0, 4))] for _ in range(100)]
    path = write_corpus(tmp_path / "c", [documents[:50], documents[50:]])
    whole = count_lengths(open_corpus(path).shards)
    monkeypatch.setattr(lengths_module, "_BLOCK_DOCUMENTS", 7)
    blocks = count_lengths(open_corpus(path).shards)
    assert np.array_equal(whole.lengths, blocks.lengths)
    assert np.array_equal(whole.documents, blocks.documents)
    expected = np.unique([sum(map(len, document)) for document in documents], return_counts=True)
    assert np.array_equal(whole.documents, expected[1])


def test_copies_are_counted_exactly_when_all_documents_are_hashed(tmp_path: Path) -> None:
    path = write_corpus(
        tmp_path / "c",
        [[text_document("one"), text_document("two"), [[]], [[]]], [text_document("one"), text_document("one")]],
    )
    found = inspect(path).duplicates
    assert (found.sampled, found.documents, found.copies, found.share) == (4, 4, 2, 0.5)
    assert not found.lower_bound


def test_pairs_of_copies_are_found_by_a_sample_that_would_miss_them_document_by_document(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    unique = [[rng.integers(0, 256, int(n)).tolist()] for n in rng.integers(20, 1500, 3000)]
    documents = [*unique, *unique[:1000]]
    path = write_corpus(tmp_path / "c", [[documents[i] for i in rng.permutation(4000)]])
    corpus = open_corpus(path)
    found = estimate_duplicates(corpus, count_lengths(corpus.shards), sample=800)
    assert found.sampled <= 800
    assert found.share == pytest.approx(0.25, abs=0.06)
    assert "estimated from" in found.describe()


def test_one_page_repeated_many_times_is_noticed_and_the_estimate_called_a_lower_bound(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [[[7] * 50]] * 1500 + [[rng.integers(0, 256, int(n)).tolist()] for n in rng.integers(60, 900, 1500)]
    path = write_corpus(tmp_path / "c", [[documents[i] for i in rng.permutation(3000)]])
    corpus = open_corpus(path)
    found = estimate_duplicates(corpus, count_lengths(corpus.shards), sample=600)
    assert found.lower_bound
    assert found.share == pytest.approx(0.5, abs=0.05)


def test_a_corpus_without_documents_is_described(tmp_path: Path) -> None:
    write_pair(tmp_path / "x", [])
    assert "(no documents)" in inspect(tmp_path / "x", tokenizer="bytes").describe()


def test_a_path_without_data_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ArgosyError) as refusal:
            inspect(path)
        assert refusal.value.code == "data.not-found"


def test_an_unfinished_preparation_is_not_taken_for_data(tmp_path: Path) -> None:
    write_pair(tmp_path / "shard-00000", [text_document("half")])
    (tmp_path / ".parts").mkdir()
    with pytest.raises(ArgosyError, match="unfinished"):
        inspect(tmp_path)


def test_the_verb_prints_text_or_json(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "c", [[text_document("hello")]])
    app = typer.Typer()
    app.command()(data_corpus.inspect)
    text = CliRunner().invoke(app, [str(path)])
    assert text.exit_code == 0
    assert "tokens per document" in text.stdout
    facts = json.loads(CliRunner().invoke(app, [str(path), "--json"]).stdout)
    assert (facts["documents"], facts["shown"][0]["text"]) == (1, "hello")

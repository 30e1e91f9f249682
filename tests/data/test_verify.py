"""`verify`: a good corpus passes, every kind of damage is named, and one run finds all of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from corpora import text_document, write_corpus, write_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from argosy.cli import data_corpus
from argosy.data.corpus import verify as verify_module
from argosy.data.corpus.verify import VerifyReport, verify
from argosy.errors import ArgosyError

SHARDS = [[text_document("abc"), [[]], [[1, 2], [3]]], [text_document("defg")], []]
# Counts of the first shard.
SEQUENCES, DOCUMENTS = 3, 3
LENGTHS, POINTERS, BOUNDS = 34, 34 + 4 * SEQUENCES, 34 + 12 * SEQUENCES


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "c", SHARDS)


def poke(path: Path, offset: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


def words(report: VerifyReport) -> str:
    return "\n".join(map(str, report.faults))


def test_a_whole_corpus_passes(corpus: Path) -> None:
    for workers in (1, 3):
        report = verify(corpus, workers=workers)
        assert report.faults == []
        assert (report.shards, report.files, report.documents, report.tokens) == (3, 6, 4, 12)
        report.refuse_faults()
    assert "all good" in report.describe()


def test_a_bare_pair_passes_and_says_that_no_hash_was_checked(tmp_path: Path) -> None:
    write_pair(tmp_path / "x", SHARDS[0])
    report = verify(tmp_path / "x")
    assert report.faults == []
    assert "no hashes" in report.describe()


@pytest.mark.parametrize(
    ("name", "offset", "content", "expected"),
    [
        ("shard-00000.bin", 0, b"\x05", "sha256"),
        ("shard-00000.idx", 0, b"X", "does not start as a Megatron index"),
        ("shard-00000.idx", 17, b"\x04", "says int32 tokens, the manifest uint16"),
        ("shard-00000.idx", 18, struct.pack("<Q", 9), "need"),
        (
            "shard-00000.idx",
            LENGTHS,
            struct.pack("<i", 5),
            "pointers are not where the sequences before end, first number 1",
        ),
        ("shard-00000.idx", LENGTHS, struct.pack("<i", -1), "negative length, first number 0"),
        ("shard-00000.idx", POINTERS + 8, struct.pack("<q", 10), "1 of 3 pointers"),
        ("shard-00000.idx", BOUNDS, struct.pack("<q", 1), "first document starts at sequence 1"),
        (
            "shard-00000.idx",
            BOUNDS + 8,
            struct.pack("<q", 2),
            "1 document bounds go backwards, first number 2: 1 after 2",
        ),
        ("shard-00000.idx", BOUNDS + 24, struct.pack("<q", 2), "documents end at sequence 2"),
        ("shard-00000.bin", 0, b"\xff\xff", "holds token id 65,535, the tokenizer's vocabulary ends at 256"),
        ("shard-00000.bin", 0, b"\xff\xff", "largest token id is 65,535, the manifest promises 256"),
    ],
)
def test_a_changed_byte_is_named(corpus: Path, name: str, offset: int, content: bytes, expected: str) -> None:
    poke(corpus / name, offset, content)
    report = verify(corpus)
    assert expected in words(report)
    assert all(name in fault.file for fault in report.faults if "sha256" in fault.what)
    assert "sha256" in words(report)


def test_a_pair_without_manifest_is_checked_in_all_but_its_hashes(tmp_path: Path) -> None:
    write_pair(tmp_path / "x", SHARDS[0], "int32")
    poke(tmp_path / "x.idx", POINTERS + 8, struct.pack("<q", 10))
    poke(tmp_path / "x.bin", 4, struct.pack("<i", -7))
    assert "pointers" in words(verify(tmp_path / "x"))
    assert "negative token id -7" in words(verify(tmp_path / "x"))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: (path / "shard-00001.bin").unlink(), "cannot be read: No such file"),
        (lambda path: (path / "shard-00001.idx").unlink(), "cannot be read: No such file"),
        (
            lambda path: (path / "shard-00001.bin").write_bytes(b"\x01\x00\x02"),
            "has 3 bytes, but its .idx describes 5 tokens",
        ),
        (lambda path: (path / "shard-00001.idx").write_bytes(b""), "fewer than its 34-byte header"),
        (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "not a tokenizer.json"),
    ],
)
def test_missing_and_cut_files_are_named(corpus: Path, damage: Callable[[Path], object], expected: str) -> None:
    damage(corpus)
    assert expected in words(verify(corpus))


def test_books_that_do_not_add_up_are_named(corpus: Path) -> None:
    text = (corpus / "manifest.json").read_text()
    (corpus / "manifest.json").write_text(text.replace('"documents": 1', '"documents": 2'))
    assert "describes 1 documents, the manifest promises 2" in words(verify(corpus))
    assert "its sources gave 4 documents, its shards hold 5" in words(verify(corpus))


def test_every_fault_is_listed_and_then_refused(corpus: Path) -> None:
    (corpus / "shard-00001.bin").unlink()
    poke(corpus / "shard-00000.bin", 0, b"\xff\xff")
    report = verify(corpus)
    assert {Path(fault.file).name for fault in report.faults} == {"shard-00000.bin", "shard-00001.bin"}
    assert len(report.faults) == 4
    with pytest.raises(ArgosyError, match="and 3 more") as refusal:
        report.refuse_faults()
    assert refusal.value.code == "data.corrupt"


def test_blocks_of_any_size_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    documents = [[rng.integers(0, 256, 3).tolist()] for _ in range(200)]
    path = write_corpus(tmp_path / "c", [documents])
    poke(path / "shard-00000.idx", 34 + 4 * 200 + 8 * 150, struct.pack("<q", 1))
    whole = verify(path)
    monkeypatch.setattr(verify_module, "_BLOCK", 64)
    assert verify(path) == whole
    assert "first number 150" in words(whole)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_flipped_byte_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    corpus = write_corpus(tmp_path_factory.mktemp("flip") / "c", SHARDS[:2])
    files = sorted(file for file in corpus.iterdir() if file.suffix in (".bin", ".idx"))
    file = data.draw(st.sampled_from(files))
    at = data.draw(st.integers(0, file.stat().st_size - 1))
    poke(file, at, bytes((file.read_bytes()[at] ^ data.draw(st.integers(1, 255)),)))
    faults = verify(corpus).faults
    assert str(file) in {fault.file for fault in faults}


def test_the_verb_ends_with_exit_code_2_on_a_fault(corpus: Path) -> None:
    app = typer.Typer()
    app.command()(data_corpus.verify)
    assert CliRunner().invoke(app, [str(corpus)]).exit_code == 0
    (corpus / "shard-00001.bin").unlink()
    result = CliRunner().invoke(app, [str(corpus), "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["good"] is False
    result = CliRunner().invoke(app, [str(corpus)])
    assert isinstance(result.exception, ArgosyError)
    assert "fault  " in result.stdout

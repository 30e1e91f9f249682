"""Tokenizers: exact round trips, stable fingerprints, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer, train_bpe
from argosy.errors import ArgosyError

TRAINED = train_bpe(["def main(): return 'hello world' # a comment\n"] * 30, 320)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back_exactly(text: str) -> None:
    for tokenizer in (ByteTokenizer(), JsonTokenizer(TRAINED, "trained")):
        [ids] = tokenizer.encode_batch([text])
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod_id not in ids


def test_the_fingerprint_is_of_what_decides_ids() -> None:
    document = json.loads(TRAINED)
    original = JsonTokenizer(TRAINED, "a").fingerprint
    reordered = json.dumps(dict(reversed(document.items())))
    assert JsonTokenizer(reordered, "b").fingerprint == original
    padded = json.dumps(
        document
        | {
            "padding": None,
            "truncation": {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        }
    )
    assert JsonTokenizer(padded, "c").fingerprint == original
    document["model"]["merges"] = document["model"]["merges"][:-1]
    assert JsonTokenizer(json.dumps(document), "d").fingerprint != original


def test_a_stored_length_limit_does_not_cut_documents() -> None:
    limit = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    tokenizer = JsonTokenizer(json.dumps(json.loads(TRAINED) | {"truncation": limit}), "limited")
    assert len(tokenizer.encode_batch(["a b c d e f g"])[0]) > 2


def test_training_is_repeatable() -> None:
    assert train_bpe(["some text to learn from"] * 5, 300) == train_bpe(["some text to learn from"] * 5, 300)


def test_tokenizers_are_found_by_file_directory_or_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(TRAINED)
    by_file, by_directory = load_tokenizer(str(tmp_path / "tokenizer.json")), load_tokenizer(str(tmp_path))
    assert by_file.fingerprint == by_directory.fingerprint
    assert load_tokenizer("bytes").vocab_size == 257
    (tmp_path / "stored.json").write_text(ByteTokenizer().to_json())
    assert load_tokenizer(str(tmp_path / "stored.json")).fingerprint == "bytes-v1"


@pytest.mark.parametrize("content", [None, b"", b"{}", b"not json", b"\xff", b"[]"])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArgosyError) as refusal:
        load_tokenizer(str(path))
    assert refusal.value.code == "tokenizer.not-found"


def test_the_end_of_document_token_is_found_or_asked_for(tmp_path: Path) -> None:
    renamed = TRAINED.replace("<|endoftext|>", "<|fin|>")
    with pytest.raises(ArgosyError) as refusal:
        _ = JsonTokenizer(renamed, "t").eod_id
    assert "<|fin|>" in refusal.value.fix
    assert JsonTokenizer(renamed, "t", eod="<|fin|>").eod_id == 0

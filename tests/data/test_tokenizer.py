"""Tokenizers: exact round trips, stable fingerprints, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.data.text import engines
from argosy.data.text.engines import Proof, choose_engine, load_engine
from argosy.data.text.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer, train_bpe
from argosy.errors import ArgosyError

TRAINED = train_bpe(["def main(): return 'hello world' # a comment\n"] * 30, 320)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back_exactly(text: str) -> None:
    for tokenizer in (ByteTokenizer(), JsonTokenizer(TRAINED, "trained")):
        ids, lengths = tokenizer.encode_batch([text])
        assert lengths.tolist() == [len(ids)]
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
    assert len(tokenizer.encode("a b c d e f g")) > 2


def test_training_is_repeatable() -> None:
    assert train_bpe(["some text to learn from"] * 5, 300) == train_bpe(["some text to learn from"] * 5, 300)


def test_tokenizers_are_found_by_file_directory_or_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(TRAINED)
    by_file, by_directory = load_tokenizer(str(tmp_path / "tokenizer.json")), load_tokenizer(str(tmp_path))
    assert by_file.fingerprint == by_directory.fingerprint
    assert load_tokenizer("bytes").vocab_size == 257
    (tmp_path / "stored.json").write_bytes(ByteTokenizer().stored()[1])
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


def test_texts_are_encoded_alike_alone_and_together() -> None:
    texts = ["one", "", "two three", "é"]
    for tokenizer in (ByteTokenizer(), JsonTokenizer(TRAINED, "trained")):
        ids, lengths = tokenizer.encode_batch(texts)
        alone = [tokenizer.encode(text) for text in texts]
        assert [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] == alone


def test_gpt2s_two_files_are_the_same_tokenizer_as_its_one(tmp_path: Path) -> None:
    document = json.loads(TRAINED)
    (tmp_path / "vocab.json").write_text(json.dumps(document["model"]["vocab"]))
    merges = [" ".join(pair) for pair in document["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    texts = ["def main(): # comment", "<|endoftext|> as text", "é漢 \n\n 'll"]
    found, expected = load_tokenizer(str(tmp_path)), JsonTokenizer(TRAINED, "one file")
    assert found.encode_batch(texts)[0].tolist() == expected.encode_batch(texts)[0].tolist()
    assert (found.eod_id, found.vocab_size) == (expected.eod_id, expected.vocab_size)


def test_control_tokens_in_text_only_when_asked() -> None:
    text = "a <|endoftext|> b"
    assert 0 not in JsonTokenizer(TRAINED, "t").encode(text)
    assert 0 in JsonTokenizer(TRAINED, "t", special_in_text=True).encode(text)


def test_sentencepiece_models_are_read(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("some words to learn from and more of them\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=20, minloglevel=2
    )
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.model"))
    ids, _ = tokenizer.encode_batch(["some words"])
    assert tokenizer.decode(ids) == "some words"
    # A model may have more rows than the tokenizer has pieces.
    assert tokenizer.decode([*ids, 20, 5000]) == "some words"
    name, content = tokenizer.stored()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / name).write_bytes(content)
    assert load_tokenizer(str(tmp_path / "kept")).fingerprint == tokenizer.fingerprint


def choose(reference: JsonTokenizer, sample: list[str]) -> tuple[object, str]:
    proof = Proof.by(reference, sample)

    def proven(name: str) -> str:
        proof.check(load_engine(name, reference.text, reference.special_in_text))
        return name

    return choose_engine(reference, proven)


@pytest.mark.parametrize("special_in_text", [False, True])
@pytest.mark.parametrize("engine", list(engines.ENGINES))
def test_a_fast_engine_is_used_when_it_gives_the_same_ids(
    engine: str, special_in_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ENGINES", {engine: engines.ENGINES[engine]})
    reference = JsonTokenizer(TRAINED, "t", special_in_text=special_in_text)
    name, said = choose(reference, ["some text", "with <|endoftext|> in it"])
    assert (name, said.partition(",")[0]) == (engine, engine), said
    for texts in ([], [""], ["", "one", ""]):
        encode = load_engine(engine, reference.text, special_in_text)
        for ours, theirs in zip(encode(texts), reference.encode_batch(texts), strict=True):
            assert ours.tolist() == theirs.tolist()


def test_one_different_id_and_the_reference_is_used_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(text: str, special_in_text: bool) -> object:
        def encode(texts: list[str]) -> object:
            ids, lengths = JsonTokenizer(text, "t").encode_batch(texts)
            return np.where(ids == 5, 0, ids), lengths

        return encode

    def broken(text: str, special_in_text: bool) -> object:
        raise ValueError("unknown model")

    def failing(text: str, special_in_text: bool) -> object:
        return lambda texts: 1 / 0

    # All but the last are names of installed modules: an engine is looked up before it is loaded.
    monkeypatch.setattr(engines, "ENGINES", {"json": wrong, "gzip": broken, "zlib": failing, "no_such": wrong})
    name, said = choose(JsonTokenizer(TRAINED, "t"), ["some text"])
    assert name is None
    assert "tokenizers, the reference: json differs from the reference on" in said
    assert "gzip cannot load this tokenizer (unknown model)" in said
    assert "zlib fails on hard strings" in said
    assert "no_such is not installed" in said

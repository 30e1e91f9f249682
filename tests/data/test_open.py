"""Opening a run's data refuses what would otherwise fail after hours, or silently train on wrong data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy.config.batches import Batches
from argosy.config.resolve import resolve
from argosy.data.corpus.indexed import IndexedWriter, dtype_for
from argosy.data.loader import Loader
from argosy.data.open import open_data
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.samples.masks import IGNORED
from argosy.data.text.tokenizer import Tokenizer, load_tokenizer, train_bpe
from argosy.errors import ArgosyError
from argosy.train.run import TrainOptions, train

Write = Callable[..., Path]


def refusal(path: Path, *overrides: str) -> ArgosyError:
    with pytest.raises(ArgosyError) as caught:
        open_data(resolve(path, overrides).spec)
    return caught.value


def test_the_tokenizer_stored_with_the_data_is_used(write_spec: Write) -> None:
    data = open_data(resolve(write_spec()).spec)
    assert data.tokenizer is not None
    assert data.tokenizer.fingerprint == "bytes-v1"


def test_another_tokenizer_than_the_datas_is_refused(write_spec: Write, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(train_bpe(["other words"] * 9, 260))
    error = refusal(write_spec(), f"data.tokenizer={tmp_path / 'other.json'}", "model.vocab_size=300")
    assert (error.code, error.key) == ("tokenizer.mismatch", "data.tokenizer")


def test_two_corpora_with_different_tokenizers_are_named_with_the_command_that_prepares_one_again(
    write_spec: Write, corpus: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "t.json"
    tokenizer.write_text(train_bpe(["some text"], 300))
    (tmp_path / "a.txt").write_text("some text")
    prepare([str(tmp_path / "a.txt")], load_tokenizer(str(tokenizer)), tmp_path / "other", PrepareOptions())
    found = refusal(write_spec(data={"train": [str(corpus), str(tmp_path / "other")], "seq_len": 32}))
    assert found.code == "tokenizer.mismatch"
    assert str(corpus) in found.cause
    assert f"argosy data prepare TEXT --tokenizer {corpus / 'tokenizer.json'} --output DIR" in found.fix


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(write_spec: Write) -> None:
    error = refusal(write_spec(), "model.vocab_size=256")
    assert (error.code, error.fix) == ("tokenizer.vocabulary", "model.vocab_size=257")


def test_a_model_without_a_preset_has_the_vocabulary_of_its_corpus(write_spec: Write, corpus: Path) -> None:
    found = resolve(write_spec(model={"family": "gpt", "layers": 1, "hidden": 16, "heads": 2}))
    assert (found.spec.model.vocab_size, found.spec.model.padded_vocab()) == (257, 384)
    assert found.origins["model.vocab_size"] == f"derived: the tokenizer of {corpus}"
    # A preset has a vocabulary of its own.
    assert resolve(write_spec(model="gpt2")).spec.model.vocab_size == 50257
    with pytest.raises(ArgosyError, match="vocab_size is required"):
        resolve(write_spec(model={"family": "gpt", "layers": 1, "hidden": 16, "heads": 2}), ["data.train=nowhere"])


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_shard_of_a_corpus_alone_has_the_vocabulary_of_its_corpus(
    write_spec: Write, corpus: Path, tmp_path: Path, suffix: str
) -> None:
    path = write_spec(model={"family": "gpt", "layers": 1, "hidden": 16, "heads": 2})
    found = resolve(path, [f"data.train={corpus / 'shard-00000'}{suffix}"])
    assert found.spec.model.vocab_size == 257
    assert found.origins["model.vocab_size"] == f"derived: the tokenizer of {corpus}"
    assert open_data(found.spec).corpora[0].tokens > 0
    # Another pair that lies beside the shards is not of this corpus.
    shutil.copytree(corpus, tmp_path / "copy")
    for file in ("bin", "idx"):
        (tmp_path / "copy" / f"shard-00000.{file}").rename(tmp_path / "copy" / f"other.{file}")
    with pytest.raises(ArgosyError, match="vocab_size is required"):
        resolve(path, [f"data.train={tmp_path / 'copy' / 'other'}{suffix}"])


def test_a_run_whose_data_uses_little_of_the_vocabulary_says_so(write_spec: Write, tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "pair", dtype_for(1000))
    writer.add_document([np.arange(0, 100)])
    writer.finish()
    pair = f"data.train={tmp_path / 'pair'}"

    def said(*overrides: str) -> str:
        return (
            open_data(resolve(write_spec(model="gpt2"), ["data.seq_len=8", *overrides]).spec).unused_vocabulary() or ""
        )

    # 50,000 rows of width 768.
    assert "38.4M parameters" in said()
    assert "model.vocab_size=257 leaves them out" in said()
    assert "model.vocab_size=100 leaves them out" in said(pair)
    assert said("model.vocab_size=512") == said(pair, "model.vocab_size=199") == ""
    # No tokenizer is smaller than that of bytes.
    assert said(pair, "data.tokenizer=bytes", "model.vocab_size=257") == ""


def _gpt2_like(path: Path) -> Tokenizer:
    """Return a tokenizer of 5,000 words whose end-of-document token is the last id, as in GPT-2."""
    words = {f"w{number}": number for number in range(4999)}
    added = {
        "id": 4999,
        "content": "<|endoftext|>",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    tokenizer = {
        "version": "1.0", "model": {"type": "WordLevel", "vocab": words | {"<|endoftext|>": 4999}, "unk_token": "w0"},
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [added | {"normalized": False}],
    }  # fmt: skip
    path.write_text(json.dumps(tokenizer))
    return load_tokenizer(str(path))


def test_an_unused_vocabulary_is_found_though_the_last_id_ends_documents(
    write_spec: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = _gpt2_like(tmp_path / "t.json")

    def said(words: range, data: dict[str, Any] | None = None, rows: int = 5000) -> str:
        text = tmp_path / f"{len(words)}.txt"
        text.write_text("\n".join(f"w{number} w0 w1" for number in words))
        corpus = tmp_path / f"corpus-{len(words)}"
        prepare([str(text)], tokenizer, corpus, PrepareOptions(overwrite=True))
        path = write_spec(model="gpt2", data={"train": str(corpus), "seq_len": 8} | (data or {}))
        return open_data(resolve(path, [f"model.vocab_size={rows}"]).spec).unused_vocabulary() or ""

    # Ids in the middle of the vocabulary are counted: 1,000, the two first and the end of a document.
    note = said(range(2000, 3000))
    assert note.startswith(
        "the data uses 1,003 of the 5,000 ids of the vocabulary: 3.07M parameters are of tokens that never occur; "
    )
    assert "train-tokenizer --vocab-size 1003`" in note
    assert "train-tokenizer --vocab-size 257`" in said(range(100, 110))
    assert said(range(2, 2500)) == ""
    # Some ids are in the corpus of validation alone.
    said(range(3000, 4600))
    both = {"validation": str(tmp_path / "corpus-1600"), "split": [100, 0, 0]}
    assert said(range(2000, 3000), both) == ""
    # A corpus that is streamed is not downloaded to be counted.
    streamed = {"path": f"file://{tmp_path / 'corpus-10'}", "cache": str(tmp_path / "cache"), "cache_limit": "64MB"}
    assert said(range(100, 110), {"train": [streamed]}) == ""
    # Of a large corpus, a part is counted.
    monkeypatch.setattr("argosy.data.open._COUNT_TOKENS", 100)
    monkeypatch.setattr("argosy.data.open._COUNT_BLOCKS", 4)
    part = said(range(2000, 3000))
    assert part.startswith("500 tokens of the data, read at even distances, use ")
    assert "parameters are of tokens that do not occur in them; " in part


def test_a_token_beyond_the_vocabulary_of_a_bare_pair_is_found_by_looking(write_spec: Write, tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "pair", dtype_for(1000))
    for _ in range(20):
        writer.add_document([np.arange(0, 100)])
    writer.add_document([np.array([257])])
    writer.finish()
    error = refusal(write_spec(), f"data.train={tmp_path / 'pair'}")
    assert error.code == "tokenizer.vocabulary"
    assert "257" in error.cause
    data = open_data(resolve(write_spec(), [f"data.train={tmp_path / 'pair'}", "model.vocab_size=258"]).spec)
    assert data.tokenizer is None


def test_a_run_reads_a_corpus_through_its_cache_as_it_would_locally(
    write_spec: Write, corpus: Path, tmp_path: Path
) -> None:
    source = {"path": f"file://{corpus}", "cache": str(tmp_path / "cache"), "cache_limit": "64MB"}
    path = write_spec(data={"train": [source], "seq_len": 32, "split": [90, 10, 0]})
    streamed, local = open_data(resolve(path).spec), open_data(resolve(write_spec()).spec)
    assert streamed.facts() == local.facts()
    with Loader(streamed.training(), batches=Batches(8), consumed_samples=16) as loader:
        for step in range(2, 6):
            assert np.array_equal(loader.next_batch().tokens, local.training().batch(8 * step, 8).tokens)
    assert train(resolve(path), path, TrainOptions(quiet=True)) == 0


@pytest.mark.parametrize(
    ("source", "code"),
    [({"path": "s3://bucket/corpus"}, "config.missing-key"), ({"path": "local", "cache": "c"}, "config.conflict")],
)
def test_a_cache_goes_with_a_url(write_spec: Write, source: dict[str, str], code: str) -> None:
    with pytest.raises(ArgosyError) as caught:
        resolve(write_spec(data={"train": [source], "seq_len": 32}))
    assert (caught.value.code, caught.value.key) == (code, "data.train.0.cache")


def test_missing_data_is_refused(write_spec: Write, tmp_path: Path) -> None:
    assert refusal(write_spec(), f"data.train={tmp_path / 'no' / 'where'}").code == "data.not-found"
    assert refusal(write_spec(), f"data.train={tmp_path / 'nowhere'}").code == "data.not-found"


@pytest.mark.parametrize("place", ["train", "validation"])
@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_missing_data_with_a_recipe_is_made_by_the_command_that_follows_it(
    write_spec: Write, corpus: Path, tmp_path: Path, place: str, launched: bool, begun: bool
) -> None:
    if begun:
        (tmp_path / "later" / ".parts").mkdir(parents=True)
    missing = {"path": str(tmp_path / "later"), "prepare": {"fetch": "c4"}}
    sources = {"train": [str(corpus)], "seq_len": 32} | {place: [missing]}
    cluster = {"cluster": {"target": "jobset", "nodes": 2}} if launched else {}
    found = refusal(write_spec(data=sources, **cluster))
    assert (found.code, found.key) == ("data.not-found", f"data.{place}.0.path")
    assert "argosy data build" in found.fix
    assert ("argosy launch" in found.fix) is launched
    assert "data prepare" not in str(found)


def test_a_pair_of_files_with_a_recipe_is_opened(write_spec: Write, corpus: Path) -> None:
    prefix = next(corpus.glob("*.idx")).with_suffix("")
    sources = {"train": [{"path": str(prefix), "prepare": {"fetch": "c4"}}], "seq_len": 32}
    assert open_data(resolve(write_spec(data=sources)).spec).training().batch(0, 600).tokens.size


def test_no_loss_is_taken_across_documents_when_asked(write_spec: Write) -> None:
    path = write_spec()
    plain = open_data(resolve(path).spec).training().batch(0, 600)
    masked = open_data(resolve(path, ["data.mask_eod=true"]).spec).training().batch(0, 600)
    ends = plain.tokens == 256
    assert ends.any()
    assert (masked.labels[ends] == IGNORED).all()
    assert np.array_equal(masked.labels[~ends], plain.labels[~ends])
    assert masked.valid_tokens == plain.valid_tokens - ends.sum()


def test_fill_in_the_middle_changes_training_samples_only_and_repeats(write_spec: Write, tmp_path: Path) -> None:
    document = json.loads(train_bpe(["some words of text and more words"] * 20, 300))
    names = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    top = max(document["model"]["vocab"].values())
    document["added_tokens"] += [
        document["added_tokens"][0] | {"id": top + 1 + i, "content": name} for i, name in enumerate(names)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "some words of text and more words of text " * 9}) * 1 + "\n")
    (tmp_path / "x.jsonl").write_text((tmp_path / "x.jsonl").read_text() * 40)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    prepare([str(tmp_path / "x.jsonl")], tokenizer, tmp_path / "c", PrepareOptions())
    path = write_spec(data={"train": str(tmp_path / "c"), "seq_len": 32, "split": [90, 10, 0]})
    with_fim = [f"model.vocab_size={tokenizer.vocab_size}", "data.fim={rate: 1.0}"]
    data = open_data(resolve(path, with_fim).spec)
    first, again = data.training().batch(3, 8), data.training().batch(3, 8)
    assert np.array_equal(first.tokens, again.tokens)
    assert np.isin([tokenizer.id_of(name) for name in names], first.tokens).all()
    assert not np.isin(tokenizer.id_of(names[0]), data.whole("validation").batch(0, 4).tokens)
    error = refusal_of_stream(path, "data.fim={prefix: nothing}", f"model.vocab_size={tokenizer.vocab_size}")
    assert (error.code, error.key) == ("tokenizer.vocabulary", "data.fim.prefix")


def refusal_of_stream(path: Path, *overrides: str) -> ArgosyError:
    with pytest.raises(ArgosyError) as caught:
        open_data(resolve(path, overrides).spec).training()
    return caught.value

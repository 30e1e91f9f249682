"""Samples: every token is predicted once per epoch, in an order that only the seed and the index determine."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from argosy.config.batches import Batches
from argosy.data import loader as loader_module
from argosy.data.corpus.corpus import Corpus, open_corpus
from argosy.data.corpus.indexed import IndexedReader, IndexedWriter, dtype_for
from argosy.data.loader import Loader
from argosy.data.samples.windows import Batch, SampleStream, Windows
from argosy.errors import ArgosyError

WHOLE = (1.0, 0.0, 0.0)


def make(prefix: Path, lengths: list[int], first: int = 0) -> IndexedReader:
    """Write documents of the given lengths whose tokens count up from `first`."""
    writer = IndexedWriter(prefix, dtype_for(10**6))
    for length in lengths:
        writer.add_document([np.arange(first, first + length)])
        first += length
    writer.finish()
    return IndexedReader(prefix)


def stream_of(*corpora: Corpus, seq_len: int = 4, seed: int = 1, weights: list[float] | None = None) -> SampleStream:
    return SampleStream([Windows(c, c.split(WHOLE)["train"], seq_len) for c in corpora], weights, seed)


def test_each_epoch_predicts_every_token_once(tmp_path: Path) -> None:
    # 21 tokens are 5 windows of 4.
    corpus = Corpus(tmp_path, [make(tmp_path / "a", [7, 5, 9])], None)
    stream = stream_of(corpus)
    assert stream.epoch_samples == 5
    for epoch in range(3):
        labels = stream.batch(5 * epoch, 5).labels
        assert sorted(labels.ravel()) == list(range(1, 21))
    # The next epoch has another order.
    assert not np.array_equal(stream.batch(0, 5).tokens, stream.batch(5, 5).tokens)


def test_labels_are_the_tokens_one_to_the_right(tmp_path: Path) -> None:
    batch = stream_of(Corpus(tmp_path, [make(tmp_path / "a", [100])], None)).batch(0, 8)
    assert np.array_equal(batch.labels, batch.tokens + 1)
    assert batch.valid_tokens == 32


def test_windows_run_across_shards(tmp_path: Path) -> None:
    shards = [make(tmp_path / "a", [6, 3]), make(tmp_path / "b", [2], first=9), make(tmp_path / "c", [10], first=11)]
    corpus = Corpus(tmp_path, shards, None)
    assert list(corpus.read(7, 6)) == [7, 8, 9, 10, 11, 12]
    assert sorted(stream_of(corpus).batch(0, 5).labels.ravel()) == list(range(1, 21))


def test_the_order_does_not_depend_on_how_it_is_read(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, [make(tmp_path / "a", [500])], None)
    whole = stream_of(corpus).batch(0, 60).tokens
    pieces = np.concatenate([stream_of(corpus).batch(first, 5).tokens for first in range(0, 60, 5)])
    backwards = np.concatenate([stream_of(corpus).batch(i, 1).tokens for i in reversed(range(60))])[::-1]
    assert np.array_equal(whole, pieces)
    assert np.array_equal(whole, backwards)
    assert not np.array_equal(whole, stream_of(corpus, seed=2).batch(0, 60).tokens)


def test_blends_follow_their_weights(tmp_path: Path) -> None:
    a = Corpus(tmp_path, [make(tmp_path / "a", [401])], None)
    b = Corpus(tmp_path, [make(tmp_path / "b", [401], first=1000)], None)
    tokens = stream_of(a, b, weights=[3, 1]).batch(0, 80).tokens
    assert (tokens[:, 0] >= 1000).sum() == 20
    by_size = stream_of(a, Corpus(tmp_path, [make(tmp_path / "c", [101], first=1000)], None))
    # Each of the 100 + 25 windows is seen once.
    assert (by_size.batch(0, by_size.epoch_samples).tokens[:, 0] >= 1000).sum() == 25


def test_splits_cut_by_document_and_do_not_overlap(tmp_path: Path) -> None:
    shards = [make(tmp_path / "a", [3] * 7), make(tmp_path / "b", [5] * 3, first=21)]
    splits = Corpus(tmp_path, shards, None).split((70, 20, 10))
    assert [(s.first, s.last) for s in splits.values()] == [(0, 7), (7, 9), (9, 10)]
    assert [(s.start, s.end) for s in splits.values()] == [(0, 21), (21, 31), (31, 36)]


def test_a_split_too_small_for_a_sample_is_refused_with_its_numbers(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, [make(tmp_path / "a", [9, 4])], None)
    with pytest.raises(ArgosyError) as refusal:
        SampleStream([Windows(corpus, corpus.split((50, 50, 0))["validation"], 4)], None, 1)
    assert refusal.value.code == "data.empty-split"
    for number in ("1 of 2 documents", "4 tokens", "needs 5"):
        assert number in refusal.value.cause


def test_the_loader_reads_ahead_in_order_from_any_sample(tmp_path: Path) -> None:
    stream = stream_of(Corpus(tmp_path, [make(tmp_path / "a", [500])], None))
    with Loader(stream, batches=Batches(4), consumed_samples=12) as loader:
        for step in range(3, 9):
            assert np.array_equal(loader.next_batch().tokens, stream.batch(4 * step, 4).tokens)


def test_the_loader_places_each_batch_in_its_own_thread(tmp_path: Path) -> None:
    stream = stream_of(Corpus(tmp_path, [make(tmp_path / "a", [500])], None))
    threads = set()

    def place(batch: Batch) -> Batch:
        threads.add(threading.current_thread().name)
        return replace(batch, inputs={"placed": batch.tokens})

    with Loader(stream, batches=Batches(4), consumed_samples=8, place=place) as loader:
        for step in range(2, 7):
            assert np.array_equal(loader.next_batch().inputs["placed"], stream.batch(4 * step, 4).tokens)
    assert threads == {"argosy-loader"}


def test_a_read_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "_JOIN_TIMEOUT_S", 0.2)
    stream = stream_of(Corpus(tmp_path, [make(tmp_path / "a", [500])], None))
    hang = threading.Event()

    def place(batch: Batch) -> Batch:
        hang.wait(600)
        return batch

    with Loader(stream, batches=Batches(4), consumed_samples=0, place=place):
        pass
    hang.set()


def test_the_loader_hands_on_what_went_wrong(tmp_path: Path) -> None:
    prefix = tmp_path / "a"
    stream = stream_of(Corpus(tmp_path, [make(prefix, [500])], None))
    prefix.with_name("a.bin").write_bytes(b"")
    with (
        Loader(stream, batches=Batches(4), consumed_samples=0) as loader,
        pytest.raises(ArgosyError, match="ended at byte"),
    ):
        loader.next_batch()


def test_paths_lead_to_corpora_or_to_a_helpful_refusal(tmp_path: Path) -> None:
    make(tmp_path / "pair", [50])
    assert open_corpus(tmp_path / "pair").tokens == open_corpus(tmp_path / "pair.bin").tokens == 50
    with pytest.raises(ArgosyError) as directory:
        open_corpus(tmp_path)
    assert str(tmp_path / "pair") in directory.value.fix
    for missing in ("nothing", "no/such/place"):
        with pytest.raises(ArgosyError) as refusal:
            open_corpus(tmp_path / missing)
        assert refusal.value.code in ("data.not-found", "data.bad-index")

"""Inverse cloze samples: a query is a sentence of its block, mostly taken out of it, and every window is asked about."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from corpora import write_pair

from argosy.data.corpus.corpus import Corpus, open_corpus
from argosy.data.samples.document_stream import DocumentStream
from argosy.data.samples.ict import ClozeSamples, InverseCloze
from argosy.data.samples.windows import Batch

CLS, SEP, PAD, FIRST = 1, 2, 0, 1000


def corpus_of(directory: Path, *documents: list[int]) -> Corpus:
    """Documents of sentences of these lengths; tokens count up from FIRST."""
    at, made = FIRST, []
    for document in documents:
        sentences = []
        for length in document:
            sentences.append(list(range(at, at + length)))
            at += length
        made.append(sentences)
    write_pair(directory / "pair", made)
    return open_corpus(directory / "pair")


def samples_of(
    corpus: Corpus, *, seed: int = 1, stays: float = 0.1, seq_len: int = 24, query_len: int = 8
) -> ClozeSamples:
    task = InverseCloze(seq_len, query_len, 10_000, CLS, SEP, PAD, query_in_block=stays)
    return ClozeSamples(corpus, corpus.split((1, 0, 0))["train"], task, seed, number=0, ends_in_eod=False)


def texts(batch: Batch, row: int) -> tuple[list[int], list[int]]:
    """(block, query) without what surrounds them."""
    found = []
    for tokens, mask in (
        (batch.tokens, batch.inputs["padding_mask"]),
        (batch.inputs["query_tokens"], batch.inputs["query_padding_mask"]),
    ):
        used = tokens[row][mask[row]].tolist()
        assert (used[0], used[-1]) == (CLS, SEP)
        assert (tokens[row][~mask[row]] == PAD).all()
        found.append(used[1:-1])
    return found[0], found[1]


def test_a_query_is_a_sentence_and_mostly_not_in_its_block(tmp_path: Path) -> None:
    samples = samples_of(corpus_of(tmp_path, *[[3, 5, 9, 4]] * 5))
    batch = samples.batch(np.arange(2000))
    kept = 0
    for row in range(2000):
        block, query = texts(batch, row)
        start = (query[0] - FIRST) % 21
        assert start in (0, 3, 8, 17)
        sentence = {0: 3, 3: 5, 8: 9, 17: 4}[start]
        assert len(query) == min(sentence, 6)
        stays = set(query) <= set(block)
        assert len(block) == (21 if stays else 21 - sentence)
        kept += stays
    assert abs(kept / 2000 - 0.1) < 4 * np.sqrt(0.09 / 2000)


def test_an_epoch_asks_about_every_window_once_with_its_own_number(tmp_path: Path) -> None:
    samples = samples_of(corpus_of(tmp_path, [50, 50], [3, 4], [1], [7]), stays=1.0)
    batch = samples.batch(np.arange(samples.count))
    assert sorted(batch.labels.tolist()) == list(range(samples.count))
    assert batch.valid_tokens == samples.count
    seen = [token for row in range(samples.count) for token in texts(batch, row)[0]]
    assert sorted(seen) == list(range(FIRST, FIRST + 115))
    again = samples.batch(np.arange(samples.count, 2 * samples.count))
    assert not np.array_equal(batch.inputs["query_tokens"], again.inputs["query_tokens"])


def test_a_window_without_sentences_gives_a_stretch_of_at_most_half(tmp_path: Path) -> None:
    samples = samples_of(corpus_of(tmp_path, [20], [1], [3]), stays=0.0)
    batch = samples.batch(np.arange(30))
    for row in range(30):
        block, query = texts(batch, row)
        assert query == list(range(query[0], query[0] + len(query)))
        assert (len(block), len(query)) in ((14, 6), (2, 1), (1, 1))
        assert len(block) == 1 or not set(query) & set(block)


def test_a_sample_is_the_same_in_any_batch_and_is_announced_before_it_is_read(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [9, 9, 9, 9], [5, 5])
    stream = DocumentStream([samples_of(corpus)], None)
    whole = stream.batch(0, 12)
    for i in range(12):
        alone = stream.batch(i, 1)
        assert np.array_equal(alone.tokens[0], whole.tokens[i])
        assert np.array_equal(alone.inputs["query_tokens"][0], whole.inputs["query_tokens"][i])
        announced = {FIRST + t for part in samples_of(corpus).ranges(np.array([i])) for t in part}
        assert announced == set(sum(texts(alone, 0), []))  # noqa: RUF017 - two short lists

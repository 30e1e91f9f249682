"""BERT's samples: every token once an epoch, nothing lost under the mask, pairs that are what their label says."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from argosy.data.corpus.corpus import Corpus
from argosy.data.corpus.indexed import IndexedReader, IndexedWriter, dtype_for
from argosy.data.samples.bert_samples import DOES_NOT_FOLLOW, FOLLOWS, BertSamples, MaskedBatch, MaskedLM
from argosy.data.samples.document_windows import DocumentWindows
from argosy.data.samples.draws import sample_keys
from argosy.data.samples.masks import IGNORED
from argosy.errors import ArgosyError

WHOLE = (1.0, 0.0, 0.0)
FIRST = 1000  # the first token of a corpus; the ids below are the specials' and random replacements'
CLS, SEP, MASK, PAD = 101, 102, 103, 0
Documents = list[list[int]]  # the lengths of each document's sentences
CORPORA = st.lists(st.lists(st.integers(1, 12), max_size=6), min_size=1, max_size=8)


def corpus_of(directory: Path, *shards: Documents) -> Corpus:
    """Token i of the corpus is FIRST + i, so that where a token came from can be read off it."""
    token, readers = FIRST, []
    for number, documents in enumerate(shards):
        prefix = directory / f"shard{number}"
        writer = IndexedWriter(prefix, dtype_for(10**6))
        for sentences in documents:
            ends = token + np.cumsum([0, *sentences])
            writer.add_document([np.arange(a, b) for a, b in itertools.pairwise(ends)])
            token = int(ends[-1])
        writer.finish()
        readers.append(IndexedReader(prefix))
    return Corpus(directory, readers, None)


def task(seq_len: int = 32, **others: object) -> MaskedLM:
    values = {"vocab_size": 100_000, "cls": CLS, "sep": SEP, "mask": MASK, "pad": PAD, "short_seq_prob": 0.0} | others
    return MaskedLM(seq_len, **values)  # type: ignore[arg-type]


def samples_of(corpus: Corpus, made: MaskedLM, seed: int = 1, *, ends_in_eod: bool = False) -> BertSamples:
    return BertSamples(corpus, corpus.split(WHOLE)["train"], made, seed, ends_in_eod=ends_in_eod)


def parts(batch: MaskedBatch, row: int) -> tuple[list[int], list[int]]:
    """A and B, unmasked; the layout around them is checked."""
    tokens = np.where(batch.labels[row] != IGNORED, batch.labels[row], batch.tokens[row])
    used = int(batch.padding_mask[row].sum())
    assert batch.padding_mask[row, :used].all()
    assert (tokens[used:] == PAD).all()
    bounds = np.flatnonzero(tokens[:used] == SEP)
    assert tokens[0] == CLS
    assert bounds[-1] == used - 1
    first_end = int(bounds[0])
    assert batch.token_types[row].tolist() == [0] * (first_end + 1) + [1] * (used - first_end - 1) + [0] * (
        len(tokens) - used
    )
    return tokens[1:first_end].tolist(), tokens[first_end + 1 : used - 1].tolist()


def is_run(tokens: list[int]) -> bool:
    return all(b == a + 1 for a, b in itertools.pairwise(tokens))


@settings(deadline=None, max_examples=60)
@given(CORPORA, CORPORA, st.integers(1, 15), st.booleans())
@example([[], [1], [40]], [[]], 3, False)  # empty, one token, one long sentence, an empty one at the end of the file
@example([[1], [1, 1]], [[2]], 5, True)
def test_windows_hold_every_token_of_every_document_once(
    one: Documents, other: Documents, length: int, ends_in_eod: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        corpus = corpus_of(Path(directory), one, other)
        split = corpus.split((0.0, 1.0, 0.0))["validation"]
        windows = DocumentWindows(corpus, split, length, ends_in_eod=ends_in_eod)
        at, number = 0, 0
        for sentences in one + other:
            end = at + max(0, sum(sentences) - ends_in_eod)
            count = -(-(end - at) // length)
            siblings, covered = (number, number + count), at
            for _ in range(count):
                window = windows.locate(number)
                assert (window.start, window.document_end, window.siblings) == (covered, end, siblings)
                assert 0 < window.end - window.start <= length
                inside = {at + int(b) for b in np.cumsum([0, *sentences]) if window.start < at + b < window.end}
                assert window.sentences.tolist() == sorted(inside)
                covered, number = window.end, number + 1
            assert covered == end
            at += sum(sentences)
        assert windows.count == number


def test_windows_begin_at_sentences_where_they_still_fit(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [[4, 4, 4, 4, 4]])
    for length, expected in ((20, [0]), (13, [0, 8]), (10, [0, 10]), (11, [0, 10])):
        windows = DocumentWindows(corpus, corpus.split(WHOLE)["train"], length, ends_in_eod=False)
        assert [windows.locate(w).start for w in range(windows.count)] == expected


@settings(deadline=None, max_examples=40)
@given(CORPORA, st.sampled_from(["sop", "none"]), st.integers(5, 20), st.integers(0, 2**40))
def test_an_epoch_shows_every_token_once_and_keeps_the_original_of_what_it_hides(
    documents: Documents, pair: str, seq_len: int, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        corpus = corpus_of(Path(directory), [*documents, [3]])
        made = samples_of(corpus, task(seq_len, pair=pair), seed)
        for epoch in (0, 5):
            batch = made.samples(np.arange(epoch * made.count, (epoch + 1) * made.count))
            assert batch.tokens.shape == (made.count, seq_len)
            seen = [token for row in range(made.count) for part in parts(batch, row) for token in part]
            assert sorted(seen) == list(range(FIRST, FIRST + corpus.tokens))


def test_a_sample_is_the_same_alone_in_any_batch_and_in_any_order(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [[7, 20, 3], [50]], [[1], [9, 9, 9]])
    for made in (task(max_ngram=3, short_seq_prob=0.3), task(pair="sop"), task(pair="none")):
        stream = samples_of(corpus, made)
        whole = stream.samples(np.arange(3 * stream.count))
        order = np.random.default_rng(0).permutation(3 * stream.count)
        alone = [samples_of(corpus, made).samples(order[i : i + 1]) for i in range(len(order))]
        together = stream.samples(order)
        for field in ("tokens", "labels", "token_types", "padding_mask", "pair_labels"):
            expected = getattr(whole, field)[order]
            assert np.array_equal(getattr(together, field), expected)
            assert np.array_equal(np.concatenate([getattr(batch, field) for batch in alone]), expected)
        epochs = np.split(whole.labels, 3)
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(samples_of(corpus, made, 2).samples(np.arange(3)).tokens, whole.tokens[:3])


def test_swapped_pairs_are_labelled_and_parted_at_sentences(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [[6, 4, 9, 7]] * 10)
    batch = samples_of(corpus, task(pair="sop")).samples(np.arange(2000))
    starts = {FIRST + d * 26 + s for d in range(10) for s in (6, 10, 19)}
    cuts = Counter[int]()
    for row, label in enumerate(batch.pair_labels):
        first, second = parts(batch, row)
        if label == DOES_NOT_FOLLOW:
            first, second = second, first
        assert is_run(first + second)
        assert second[0] in starts
        cuts[(second[0] - FIRST) % 26] += 1
    assert abs(batch.pair_labels.mean() - 0.5) < 4 * 0.5 / np.sqrt(2000)
    assert all(abs(count - 2000 / 3) < 100 for count in cuts.values())


def test_a_random_next_comes_from_another_document(tmp_path: Path) -> None:
    lengths = [60, 5, 30, 2, 1]
    documents = np.repeat(np.arange(5), lengths)
    corpus = corpus_of(tmp_path, [[60], [2, 3], [10, 10, 10]], [[2], [1]])
    made = samples_of(corpus, task(20))
    batch = made.samples(np.arange(400 * made.count))
    others = Counter[tuple[int, int]]()
    for row, label in enumerate(batch.pair_labels):
        first, second = parts(batch, row)
        if label == IGNORED:
            assert (first, second) == ([FIRST + 97], [])  # the document of one token makes no pair
            continue
        assert is_run(first)
        assert is_run(second)
        assert first
        assert second
        home, away = (int(documents[part[0] - FIRST]) for part in (first, second))
        assert documents[second[-1] - FIRST] == away
        assert is_run(first + second) == (label == FOLLOWS)
        assert (home == away) == (label == FOLLOWS)
        others[home, away] += 1
    pairs = batch.pair_labels[batch.pair_labels != IGNORED]
    assert abs(pairs.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(pairs))
    assert len(others) == 4 * 5  # from every document that makes pairs, to every one


def test_an_eod_that_ends_documents_is_left_out(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [[3, 4], [1], [5]])
    made = samples_of(corpus, task(pair="none"), ends_in_eod=True)
    batch = made.samples(np.arange(made.count))
    assert sorted(parts(batch, row)[0] for row in range(made.count)) == [[*range(1000, 1006)], [*range(1008, 1012)]]


def test_a_split_shows_its_own_documents_only(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [[3], [2, 4], [40]], [[5], [6, 6], [7]])
    for split in corpus.split((50, 30, 20)).values():
        made = BertSamples(corpus, split, task(16, pair="sop"), 1, ends_in_eod=False)
        batch = made.samples(np.arange(made.count))
        seen = [token - FIRST for row in range(made.count) for part in parts(batch, row) for token in part]
        assert sorted(seen) == list(range(split.start, split.end))


def test_short_samples_come_as_often_as_asked_and_in_all_lengths(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [[29]] * 20)
    batch = samples_of(corpus, task(32, pair="sop", short_seq_prob=0.25)).samples(np.arange(8000))
    sizes = batch.padding_mask.sum(axis=1) - 3
    assert set(sizes) == set(range(2, 30))
    expected = 0.25 * 27 / 28  # a target of 29 is not short
    assert abs((sizes < 29).mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / 8000)
    assert all(is_run(sorted(sum(parts(batch, row), []))) for row in range(50))  # noqa: RUF017 - two short lists


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 60), st.floats(0.01, 1), st.integers(1, 5), st.integers(0, 2**40))
def test_exactly_the_share_asked_for_is_hidden_and_only_in_the_text(
    first: int, second: int, rate: float, max_ngram: int, seed: int
) -> None:
    text = np.array([[False, *[True] * first, False, *[True] * second, False, False]])
    tokens = np.where(text, FIRST + np.arange(text.shape[1]), SEP)
    made = task(200, mask_rate=rate, max_ngram=max_ngram)
    shown, labels = made.hide(tokens, text, sample_keys(seed, "mask", [0], [0]))
    hidden = labels != IGNORED
    assert hidden.sum() == max(1, round(rate * (first + second)))
    assert not (hidden & ~text).any()
    assert np.array_equal(np.where(hidden, labels, shown), tokens)


def test_hidden_tokens_are_masked_replaced_or_kept_in_bert_s_shares() -> None:
    made = replace(task(128), vocab_size=200)
    text = np.ones((4000, 128), bool)
    tokens = np.full(text.shape, 150)
    shown, labels = made.hide(tokens, text, sample_keys(1, "mask", [0] * 4000, range(4000)))
    seen = shown[labels != IGNORED]
    assert len(seen) == 4000 * 19  # round(0.15 x 128)
    replaced = seen[(seen != MASK) & (seen != 150)]
    for share, expected in (((seen == MASK).mean(), 0.8), (len(replaced) / len(seen), 0.1 * 195 / 196)):
        assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / len(seen))
    assert set(replaced) == set(range(200)) - {CLS, SEP, MASK, PAD, 150}
    where = (labels != IGNORED).mean(axis=0)
    assert abs(where - 19 / 128).max() < 5 * np.sqrt(0.15 * 0.85 / 4000)  # every position alike


def test_no_token_is_replaced_by_one_that_the_tokenizer_does_not_have() -> None:
    """Rows that only pad the vocabulary are never inputs: an export leaves them out."""
    made = replace(task(128), vocab_size=300, mask=250, words=200)
    text = np.ones((2000, 128), bool)
    shown, labels = made.hide(np.full(text.shape, 150), text, sample_keys(1, "mask", [0] * 2000, range(2000)))
    assert set(shown[labels != IGNORED]) == set(range(200)) - {CLS, SEP, PAD} | {250}


def test_ngrams_are_hidden_together_with_weights_of_one_over_n() -> None:
    text = np.ones((3000, 400), bool)
    keys = sample_keys(1, "mask", [0] * 3000, range(3000))
    chosen = replace(task(400), mask_rate=0.01, max_ngram=3).choose(text, keys)  # four tokens: runs seldom touch
    runs = Counter(sum(1 for _ in run) for row in chosen for hidden, run in itertools.groupby(row.tolist()) if hidden)
    assert runs[2] + runs[3] > runs[1] / 2
    one = replace(task(400), mask_rate=0.0025, max_ngram=3).choose(text, keys)  # one token: nothing to run over
    assert (one.sum(axis=1) == 1).all()
    single = replace(task(400), mask_rate=0.0075, max_ngram=3).choose(text, keys)  # the first run of three, unless cut
    whole = sum("111" in "".join(map(str, row.astype(int))) for row in single) / 3000
    assert 6 / 33 * 0.9 < whole < 6 / 33 * 1.25  # 1/3 of 1 + 1/2 + 1/3; and now and then shorter runs that touch


@pytest.mark.parametrize(
    ("values", "code", "told"),
    [
        ({"seq_len": 4}, "config.arithmetic", "5 tokens at least"),
        ({"seq_len": 2, "pair": "none"}, "config.arithmetic", "3 tokens at least"),
        ({"mask_rate": 0}, "config.bad-value", "share"),
        ({"short_seq_prob": 2}, "config.bad-value", "share"),
        ({"max_ngram": 0}, "config.bad-value", "single"),
        ({"mask": SEP}, "tokenizer.vocabulary", "must differ"),
        ({"vocab_size": 103}, "tokenizer.vocabulary", "vocabulary of 103"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, object], code: str, told: str) -> None:
    with pytest.raises(ArgosyError) as refusal:
        task(**values)  # type: ignore[arg-type]
    assert refusal.value.code == code
    assert told in refusal.value.cause


def test_data_that_cannot_work_is_refused_with_its_numbers(tmp_path: Path) -> None:
    with pytest.raises(ArgosyError) as empty:
        samples_of(corpus_of(tmp_path, [[], []]), task(pair="sop"))
    assert "2 of 2 documents, 0 of them with text; a sample needs 1" in empty.value.cause
    corpus = corpus_of(tmp_path, [[9], []])
    with pytest.raises(ArgosyError) as alone:
        samples_of(corpus, task())
    assert "1 of them with text; next-sentence" in alone.value.cause
    with pytest.raises(ArgosyError) as strange:
        samples_of(corpus, task(pair="sop", vocab_size=FIRST + 5)).samples(np.arange(1))
    assert strange.value.code == "tokenizer.vocabulary"


def test_the_smallest_samples_are_whole(tmp_path: Path) -> None:
    batch = samples_of(corpus_of(tmp_path, [[2]]), task(5, pair="sop")).samples(np.arange(4))
    assert {tuple(map(tuple, parts(batch, row))) for row in range(4)} <= {((1000,), (1001,)), ((1001,), (1000,))}
    assert batch.padding_mask.all()
    assert batch.valid_tokens == 4

"""Span corruption: inputs and targets together hold the text, fill their lengths exactly, and are keyed."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from argosy.data.samples.draws import sample_keys
from argosy.data.samples.t5_samples import SpanBatch, SpanCorruption, lengths_for
from argosy.errors import ArgosyError

EOS, FIRST, START = 1, 50_000, 0
SEEDS = st.integers(0, 2**40)
Rows = npt.NDArray[np.int64]


def corruption(seq_len: int, density: float = 0.15, span: float = 3.0) -> SpanCorruption:
    return SpanCorruption(
        seq_len, FIRST, EOS, decoder_start=START, noise_density=density, mean_span=span, sentinels=10_000
    )


def texts_for(made: SpanCorruption, count: int) -> Rows:
    return 100 + np.arange(count * made.text_len, dtype=np.int64).reshape(count, -1) % 30_000


def restored(inputs: list[int], targets: list[int]) -> list[int]:
    """The text: each sentinel of the inputs replaced by what follows it in the targets."""
    assert inputs[-1] == targets[-1] == EOS
    spans: dict[int, list[int]] = {}
    sentinel = -1
    for token in targets[:-1]:
        if token > FIRST - 10_000:
            sentinel = token
            spans[sentinel] = []
        else:
            spans[sentinel].append(token)
    assert list(spans) == [FIRST - i for i in range(len(spans))]
    assert all(spans.values())
    assert [token for token in inputs if token in spans] == list(spans)
    return [token for part in inputs[:-1] for token in spans.get(part, [part])]


@settings(deadline=None)
@given(st.integers(3, 300), st.floats(0.01, 0.45), st.floats(1, 12), SEEDS, st.integers(0, 3), st.integers(0, 10**9))
def test_inputs_and_targets_give_back_the_text_and_fill_their_lengths(
    seq_len: int, density: float, span: float, seed: int, epoch: int, sample: int
) -> None:
    made = corruption(seq_len, density, span)
    texts = texts_for(made, 1)
    batch = made.corrupt(texts, seed, [epoch], [sample])
    assert batch.tokens.shape == (1, seq_len)
    assert batch.labels.shape == batch.decoder_tokens.shape == (1, made.target_len)
    assert restored(batch.tokens[0].tolist(), batch.labels[0].tolist()) == texts[0].tolist()
    assert batch.decoder_tokens[0].tolist() == [START, *batch.labels[0, :-1].tolist()]


def lengths_by_t5(inputs_length: int, density: float, span: float) -> tuple[int, int]:
    """(text, targets) by the loop of T5's random_spans_helper."""

    def corrupted(text: int) -> tuple[int, int]:
        noise = round(text * density)
        spans = round(noise / span)
        return text - noise + spans + 1, noise + spans + 1

    text = inputs_length
    while corrupted(text + 1)[0] <= inputs_length:
        text += 1
    return text, corrupted(text)[1]


def test_lengths_are_those_of_t5() -> None:
    assert (corruption(512).text_len, corruption(512).target_len) == (568, 114)  # the published figures
    for seq_len in range(32, 1100):
        made = corruption(seq_len)
        assert (made.text_len, made.target_len) == lengths_by_t5(seq_len, 0.15, 3.0)


@given(st.integers(3, 200), st.integers(1, 60), st.integers(4, 40))
def test_lengths_agree_with_a_search_through_all_texts(seq_len: int, percent: int, quarters: int) -> None:
    """Of all texts whose corrupted form has seq_len tokens, the longest."""
    density, span = percent / 100, Fraction(quarters, 4)
    fits = {}
    for text in range(2, 4 * seq_len + 8):
        noise = min(max(round(text * density), 1), text - 1)
        spans = min(max(round(Fraction(noise) / span), 1), noise, text - noise)
        if (text - noise) + spans + 1 == seq_len:
            fits[text] = (noise, spans)
    assume(fits)
    found = lengths_for(seq_len, density, float(span))
    assert found.text == max(fits)
    assert (found.noise, found.spans) == fits[found.text]
    assert found.targets == found.noise + found.spans + 1


def test_a_sample_is_the_same_alone_in_any_batch_and_in_any_order() -> None:
    made = corruption(64)
    texts = np.repeat(texts_for(made, 1), 40, axis=0)
    epochs, samples = np.repeat([0, 1], 20), np.tile(np.arange(20), 2)
    whole = made.corrupt(texts, 7, epochs, samples)
    order = np.random.default_rng(0).permutation(40)
    assert_rows(made.corrupt(texts[order], 7, epochs[order], samples[order]), whole, order)
    for i in reversed(range(40)):
        assert_rows(made.corrupt(texts[i : i + 1], 7, [epochs[i]], [samples[i]]), whole, np.array([i]))
    assert len(np.unique(whole.tokens, axis=0)) == 40  # one of its own for each sample and epoch
    assert not np.array_equal(made.corrupt(texts, 8, epochs, samples).tokens, whole.tokens)


def assert_rows(part: SpanBatch, whole: SpanBatch, rows: npt.NDArray[np.int64]) -> None:
    assert np.array_equal(part.tokens, whole.tokens[rows])
    assert np.array_equal(part.labels, whole.labels[rows])
    assert np.array_equal(part.decoder_tokens, whole.decoder_tokens[rows])


def test_noise_has_its_density_and_spans_their_mean() -> None:
    made = corruption(512)
    noise = made.noise_mask(sample_keys(3, "t5", [0] * 2000, range(2000)))
    assert (noise.sum(axis=1) == 85).all()  # round(0.15 x 568)
    starts = noise[:, 1:] & ~noise[:, :-1]
    assert (starts.sum(axis=1) == 28).all()  # round(85 / 3)
    inner = noise[:, 60:-60].mean(axis=0)  # away from the ends, which are kept first and noise last
    assert abs(inner.mean() - 85 / 568) < 0.006
    assert abs(inner - inner.mean()).max() < 5 * np.sqrt(0.15 * 0.85 / 2000)


def test_every_way_to_share_out_the_spans_is_equally_likely() -> None:
    made = corruption(12, density=0.4, span=2)  # 14 tokens: 6 of noise in 3 spans, 8 kept
    lengths = made.lengths
    assert (lengths.text, lengths.noise, lengths.spans) == (14, 6, 3)
    masks = made.noise_mask(sample_keys(5, "t5", [0] * 20_000, range(20_000)))
    seen = Counter(tuple(len(list(run)) for _, run in itertools.groupby(mask.tolist())) for mask in masks)
    ways = 10 * 21  # C(5, 2) x C(7, 2)
    assert len(seen) == ways
    expected = 20_000 / ways
    chi_square = sum((count - expected) ** 2 / expected for count in seen.values())
    assert chi_square < ways - 1 + 5 * np.sqrt(2 * (ways - 1))


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ({"seq_len": 2}, ["kept token + a sentinel + EOS = 3"]),
        ({"sentinels": 27}, ["28 spans", "85 of 568", "only 27"]),
        ({"first_sentinel": 9}, ["28 spans", "9 down to 0", "only 10"]),
        ({"eos": 32_072}, ["32099 down to 32072", "32072 among them is data.t5.eos"]),
        ({"decoder_start": 32_099}, ["28 spans", "32099 among them is data.t5.pad"]),
        ({"noise_density": 0.0}, ["share"]),
        ({"noise_density": 1.0}, ["share"]),
        ({"mean_span": 0.5}, ["token at least"]),
        ({"seq_len": 4, "noise_density": 0.5, "mean_span": 1}, ["text of 3", "to 3", "one of 4 to 5", "none to 4"]),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_arithmetic(
    values: dict[str, float], numbers: list[str]
) -> None:
    with pytest.raises(ArgosyError) as refusal:
        SpanCorruption(**{"seq_len": 512, "first_sentinel": 32_099, "eos": 1} | values)  # type: ignore[arg-type]
    assert refusal.value.code == "config.arithmetic"
    for number in numbers:
        assert number in refusal.value.cause


def test_the_smallest_sample_is_two_tokens_of_text() -> None:
    batch = corruption(3).corrupt(np.array([[70, 80]]), 1, [0], [0])
    assert batch.tokens.tolist() == [[70, FIRST, EOS]]
    assert batch.labels.tolist() == [[FIRST, 80, EOS]]
    assert corruption(3).corrupt(np.zeros((0, 2), np.int64), 1, [], []).tokens.shape == (0, 3)

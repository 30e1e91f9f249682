"""Keyed draws follow the published splitmix64 stream, never change, and are independent for each sample."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from argosy.data.samples.draws import fractions, sample_keys, words


def test_words_are_the_published_stream_of_splitmix64() -> None:
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert words(np.array([1234567], np.uint64), 4).tolist() == [expected]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=5), st.integers(0, 20))
def test_draws_of_a_key_depend_on_nothing_else(given_keys: list[int], count: int) -> None:
    keys = np.array(given_keys, np.uint64)
    drawn = fractions(keys, count)
    assert drawn.shape == (len(keys), count)
    assert ((drawn >= 0) & (drawn < 1)).all()
    for i in range(len(keys)):
        assert np.array_equal(fractions(keys[i : i + 1], count + 3)[0, :count], drawn[i])


def test_every_part_of_a_key_counts() -> None:
    keys = [
        sample_keys(seed, purpose, [epoch], [sample]).item()
        for seed in (1, 11)
        for purpose in ("a", "b")
        for epoch in (1, 11)
        for sample in (1, 11)
    ]
    assert len(set(keys)) == 16


def test_fractions_are_even_and_unrelated_from_sample_to_sample() -> None:
    drawn = fractions(sample_keys(1, "x", [0] * 1000, range(1000)), 200)
    counts = np.histogram(drawn, 100, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 99 + 5 * np.sqrt(2 * 99)
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 5 / np.sqrt(drawn.size)
    assert abs(np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]) < 5 / np.sqrt(drawn.size)

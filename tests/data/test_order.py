"""Sample order: `permute` is a bijection for every size and key, and blends keep their shares."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.samples.megatron_blend import MegatronBlend
from argosy.data.samples.order import Blend, apportion, permute

WEIGHTS = st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=12)


@settings(max_examples=60)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_every_index_comes_up_exactly_once(n: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@given(st.integers(2, 2**40), st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_the_place_of_a_sample_does_not_depend_on_what_else_is_asked(n: int, key: int, indices: list[int]) -> None:
    asked = np.array([i % n for i in indices])
    together = permute(asked, n, key)
    assert all(permute(asked[i : i + 1], n, key)[0] == together[i] for i in range(len(asked)))
    assert ((together >= 0) & (together < n)).all()


def test_keys_give_unrelated_orders() -> None:
    n = 10_000
    first, second = permute(np.arange(n), n, 1), permute(np.arange(n), n, 2)
    assert (first == second).mean() < 0.002
    assert abs(np.corrcoef(first, np.arange(n))[0, 1]) < 0.05
    assert abs(np.corrcoef(np.diff(first), np.diff(second))[0, 1]) < 0.05


@settings(max_examples=40, deadline=None)
@given(WEIGHTS, st.integers(0, 4000))
def test_a_blend_gives_each_corpus_its_samples_in_turn_without_gap_or_repeat(weights: list[float], start: int) -> None:
    blend = Blend(weights)
    corpus, local = blend.locate(np.arange(start, start + 1500))
    expected = apportion(blend.weights, start)
    for c, position in zip(corpus, local, strict=True):
        assert position == expected[c]
        expected[c] += 1
    assert np.array_equal(expected, apportion(blend.weights, start + 1500))


@pytest.mark.parametrize(("blend", "block"), [(Blend, 1 << 10), (lambda w: MegatronBlend(w, 1 << 20), 1 << 16)])
def test_threads_that_ask_at_once_are_told_what_one_is(blend: Callable[[list[float]], Any], block: int) -> None:
    asked = [np.arange(first * block, first * block + 64) for first in (0, 3, 1, 2)]
    expected = [blend([0.5, 0.3, 0.2]).locate(indices) for indices in asked]
    shared, wrong = blend([0.5, 0.3, 0.2]), []

    def ask(first: int) -> None:
        for number in (n % len(asked) for n in range(first, first + 12)):
            if not np.array_equal(shared.locate(asked[number]), expected[number]):
                wrong.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=ask, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


@given(WEIGHTS, st.integers(0, 3000))
def test_counting_ahead_equals_counting_one_by_one(weights: list[float], total: int) -> None:
    shares = np.array(weights) / np.sum(weights)
    one_by_one = np.zeros(len(weights), np.int64)
    for _ in range(total):
        one_by_one[int(np.argmin((one_by_one + 0.5) / shares))] += 1
    assert np.array_equal(apportion(shares, total), one_by_one)


@pytest.mark.parametrize("total", [10, 1000, 10**12])
def test_shares_are_kept_to_within_a_sample(total: int) -> None:
    shares = np.array([0.7, 0.2, 0.1])
    assert np.abs(apportion(shares, total) - total * shares).max() <= 1

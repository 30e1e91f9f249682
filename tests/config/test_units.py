"""Counts, durations and sizes are parsed as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.batches import Batches
from argosy.config.units import Duration, parse_count, parse_duration, parse_duration_or_none


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (500, Duration(500, "steps")),
        ("500", Duration(500, "steps")),
        ("500ba", Duration(500, "steps")),
        ("1Kba", Duration(1000, "steps")),
        ("2ep", Duration(2, "epochs")),
        ("0.5ep", Duration(0.5, "epochs")),
        ("20B", Duration(20e9, "tokens")),
        ("300Mtok", Duration(300e6, "tokens")),
        ("1.5T", Duration(1.5e12, "tokens")),
        ("10Ksp", Duration(10_000, "samples")),
        ("30min", Duration(1800, "seconds")),
        ("2h", Duration(7200, "seconds")),
        ("45s", Duration(45, "seconds")),
        ("1d", Duration(86400, "seconds")),
        ("1e9tok", Duration(1e9, "tokens")),
        ("1_000ba", Duration(1000, "steps")),
    ],
)
def test_durations(text: object, expected: Duration) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "abc", "-5", "0", "5 parsecs", "1.5", "1.5ba", True, None, "30m", [5], "ba"])
def test_what_is_not_a_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_duration(text)


def test_no_duration_can_be_asked_for_where_it_makes_sense() -> None:
    assert parse_duration_or_none(0) == Duration(0, "steps")
    with pytest.raises(ValueError, match="duration"):
        parse_duration_or_none(False)


@given(st.integers(1, 10**16), st.sampled_from(["steps", "tokens", "epochs", "samples", "seconds"]))
def test_a_duration_reads_back_as_written(amount: int, unit: str) -> None:
    duration = Duration(float(amount), unit)
    assert parse_duration(str(duration)) == duration


def test_durations_become_steps_rounded_up() -> None:
    batches = Batches(8)
    assert Duration(1000, "tokens").steps(batches, seq_len=100) == 2  # 800 tokens a step
    assert Duration(9, "samples").steps(batches, seq_len=100) == 2
    assert Duration(2, "epochs").steps(batches, seq_len=100, epoch_samples=20) == 5
    assert Duration(2, "epochs").steps(batches, seq_len=100) is None
    assert Duration(60, "seconds").steps(batches, seq_len=100) is None


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20B", 20 * 10**9),
        ("1.5K", 1500),
        (7, 7),
        ("1e6", 10**6),
        ("12,000", 12000),
        ("16.1K", 16_100),
        ("2.03M", 2_030_000),
    ],
)
def test_counts(text: object, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["1.5", 2.5, True, "many", "5 apples", "1e400", "1.0001K"])
def test_what_is_not_a_count_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_count(text)

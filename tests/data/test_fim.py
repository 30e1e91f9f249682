"""Fill-in-the-middle: documents can be restored, no EOD moves, and only (seed, epoch, sample) determines the result."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from argosy.data.samples.fim import FillInTheMiddle
from argosy.errors import ArgosyError

EOD, PREFIX, MIDDLE, SUFFIX = 0, 901, 902, 903
SENTINELS = {PREFIX, MIDDLE, SUFFIX}
SEEDS = st.integers(0, 2**40)
Row = npt.NDArray[np.int64]


def fim(rate: float = 1.0, spm_rate: float = 0.5) -> FillInTheMiddle:
    return FillInTheMiddle(prefix=PREFIX, middle=MIDDLE, suffix=SUFFIX, eod=EOD, rate=rate, spm_rate=spm_rate)


def packed(lengths: list[int], last: int = 0) -> Row:
    """Return documents of the given lengths, each with an EOD, and `last` tokens of one more. No token occurs twice."""
    row: list[int] = []
    for length in lengths:
        row += [*range(1000 + len(row), 1000 + len(row) + length), EOD]
    return np.array([*row, *range(1000 + len(row), 1000 + len(row) + last)], np.int64)


def documents(row: Row) -> list[list[int]]:
    return [part[part != EOD].tolist() for part in np.split(row, np.flatnonzero(row == EOD) + 1)]


def restored(document: list[int]) -> list[int]:
    """Return the text in reading order, from either arrangement."""
    if PREFIX not in document:
        return document
    assert document[0] == PREFIX
    assert [document.count(sentinel) for sentinel in sorted(SENTINELS)] == [1, 1, 1]
    suffix, middle = document.index(SUFFIX), document.index(MIDDLE)
    assert 0 < suffix < middle
    # Prefix and middle are already adjacent.
    if is_spm(document):
        return document[middle + 1 :] + document[2:middle]
    return document[1:suffix] + document[middle + 1 :] + document[suffix + 1 : middle]


def is_spm(document: list[int]) -> bool:
    """Return True if the sentinels are adjacent at the front. A PSM document with an empty prefix looks and reads the same."""
    return document[1] == SUFFIX


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(0, 20), SEEDS, st.integers(0, 3), st.integers(0, 10**9))
# No EOD.
@example([], 30, 1, 0, 0)
# EOD first, last and adjacent; empty and one-token documents.
@example([0, 10, 0, 0, 1], 0, 1, 0, 0)
def test_every_document_reads_as_before_and_every_eod_stays(
    lengths: list[int], last: int, seed: int, epoch: int, sample: int
) -> None:
    row = packed(lengths, last)
    out = fim().rearrange(row[None], seed, [epoch], [sample])[0]
    assert out.shape == row.shape
    assert np.array_equal(out == EOD, row == EOD)
    for before, after in zip(documents(row), documents(out), strict=True):
        if len(before) < 4:
            assert after == before
        else:
            # The sentinels replaced the last three tokens.
            assert restored(after) == before[:-3]


@given(st.integers(4, 40), SEEDS)
def test_the_two_arrangements_are_megatrons(length: int, seed: int) -> None:
    row = packed([], length)
    for spm_rate in (0.0, 1.0):
        out = fim(spm_rate=spm_rate).rearrange(row[None], seed, [0], [0])[0].tolist()
        suffix, middle = out.index(SUFFIX), out.index(MIDDLE)
        if spm_rate:
            assert out[:2] == [PREFIX, SUFFIX]
            assert out[middle + 1 :] + out[2:middle] == row[:-3].tolist()
        else:
            assert out[1:suffix] + out[middle + 1 :] + out[suffix + 1 : middle] == row[:-3].tolist()


def test_a_sample_is_the_same_alone_in_any_batch_and_in_any_order() -> None:
    rows = np.stack([packed([9, 14, 5], 8)] * 40)
    epochs, samples = np.repeat([0, 1], 20), np.tile(np.arange(20), 2)
    whole = fim(0.7).rearrange(rows, 7, epochs, samples)
    # The input is not changed.
    assert np.array_equal(rows[0], packed([9, 14, 5], 8))
    order = np.random.default_rng(0).permutation(40)
    assert np.array_equal(fim(0.7).rearrange(rows[order], 7, epochs[order], samples[order]), whole[order])
    for i in reversed(range(40)):
        assert np.array_equal(fim(0.7).rearrange(rows[i : i + 1], 7, [epochs[i]], [samples[i]])[0], whole[i])
    # Each sample and epoch is different.
    assert len(np.unique(whole, axis=0)) == 40
    assert not np.array_equal(fim(0.7).rearrange(rows, 8, epochs, samples), whole)


def test_rates_and_cuts_are_those_asked_for() -> None:
    rows = np.stack([packed([13] * 10)] * 400)
    out = fim(0.3, 0.2).rearrange(rows, 1, [0] * 400, range(400))
    changed = [d for row in out for d in documents(row) if PREFIX in d]
    # Four standard deviations are 0.029.
    assert abs(len(changed) / 4000 - 0.3) < 0.03
    spm = [d for d in changed if is_spm(d)]
    # PSM documents with an empty prefix look like SPM: the smaller of two cuts is 0 in 21 of 121 cases.
    assert abs(len(spm) / len(changed) - (0.2 + 0.8 * 21 / 121)) < 0.06
    for rate in (0.0, 1.0):
        kept = sum(
            PREFIX not in d for row in fim(rate).rearrange(rows, 1, [0] * 400, range(400)) for d in documents(row)
        )
        # 400 rows end with an empty document.
        assert kept - 400 == 4000 * (1 - rate)


def test_both_cuts_fall_anywhere_with_equal_chance() -> None:
    # Three tokens of text: four places to cut, including both ends.
    rows = np.stack([packed([6])] * 8000)
    seen = Counter[tuple[int, int]]()
    for row in fim(spm_rate=0.0).rearrange(rows, 1, [0] * 8000, range(8000)).tolist():
        before, between = row.index(SUFFIX) - 1, len(row) - 2 - row.index(MIDDLE)
        seen[before, before + between] += 1
    assert set(seen) == {(a, b) for a in range(4) for b in range(a, 4)}
    for (first, second), count in seen.items():
        chance = (1 if first == second else 2) / 16
        assert abs(count / 8000 - chance) < 4 * np.sqrt(chance * (1 - chance) / 8000)


def test_a_document_that_holds_a_sentinel_is_left_alone() -> None:
    row = packed([12, 12])
    row[3] = MIDDLE
    out = fim().rearrange(row[None], 1, [0], [0])[0]
    assert np.array_equal(out[:13], row[:13])
    assert PREFIX in out[13:]


@pytest.mark.parametrize(
    ("given_values", "code", "told"),
    [
        ({"rate": 1.5}, "config.bad-value", "probability"),
        ({"spm_rate": -0.1}, "config.bad-value", "probability"),
        ({"middle": PREFIX}, "config.conflict", f"({PREFIX}, {PREFIX}, {SUFFIX}, {EOD})"),
        ({"suffix": EOD}, "config.conflict", "four different"),
    ],
)
def test_settings_that_cannot_work_are_refused(given_values: dict[str, float], code: str, told: str) -> None:
    values = {"prefix": PREFIX, "middle": MIDDLE, "suffix": SUFFIX, "eod": EOD} | given_values
    with pytest.raises(ArgosyError) as refusal:
        FillInTheMiddle(**values)  # type: ignore[arg-type]
    assert refusal.value.code == code
    assert told in refusal.value.cause

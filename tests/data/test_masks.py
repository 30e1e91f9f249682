"""Document masks equal those of a loop over the tokens, and those of Megatron."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from argosy.data.samples.masks import IGNORED, document_bounds, document_ids, mask_eod_labels, restarting_positions

EOD = 0
ROWS = st.tuples(st.integers(1, 4), st.integers(1, 30)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(0, 3), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)


def naive(rows: npt.NDArray[np.int64]) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Compute (document ids, positions, bounds) token by token."""
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    bounds, at = [], 0
    for row in rows:
        document, place = 0, 0
        ids.append([])
        positions.append([])
        for i, token in enumerate(row):
            if place == 0:
                bounds.append(at + i)
            ids[-1].append(document)
            positions[-1].append(place)
            place += 1
            if token == EOD:
                document, place = document + 1, 0
        at += len(row)
    return ids, positions, [*bounds, at]


@given(ROWS)
# No EOD.
@example([[1, 2, 3]])
# EOD first and last.
@example([[0, 1, 2, 0]])
# Adjacent EODs.
@example([[1, 0, 0, 0, 2]])
@example([[0]])
# An EOD at the end of a row does not affect the next row.
@example([[1, 0], [2, 3]])
def test_documents_are_those_that_a_loop_finds(given_rows: list[list[int]]) -> None:
    rows = np.array(given_rows, np.int64)
    ids, positions, bounds = naive(rows)
    assert document_ids(rows, EOD).tolist() == ids
    assert restarting_positions(rows, EOD).tolist() == positions
    assert document_bounds(rows, EOD).tolist() == bounds


@given(ROWS)
def test_a_row_alone_is_as_in_its_batch(given_rows: list[list[int]]) -> None:
    # The dtype on disk.
    rows = np.array(given_rows, np.uint16)
    for find in (document_ids, restarting_positions):
        assert np.array_equal(find(rows, EOD), np.stack([find(row, EOD) for row in rows]))
        assert np.array_equal(find(rows[None], EOD)[0], find(rows, EOD))
    length = rows.shape[1]
    pieces = [document_bounds(row, EOD)[:-1] + i * length for i, row in enumerate(rows)]
    assert np.array_equal(document_bounds(rows, EOD)[:-1], np.concatenate(pieces))


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=30))
@example([0, 0, 1, 0])
def test_loss_positions_and_attention_are_megatrons(given_row: list[int]) -> None:
    window = np.array(given_row, np.int64)
    tokens, labels = window[:-1], window[1:]
    attention, loss, positions = _get_ltor_masks_and_position_ids(torch.from_numpy(tokens), EOD, True, True, True, True)
    assert np.array_equal(restarting_positions(tokens, EOD), positions.numpy())
    masked = mask_eod_labels(tokens, labels, EOD)
    assert np.array_equal(masked != IGNORED, loss.numpy() == 1)
    assert np.array_equal(masked[masked != IGNORED], labels[masked != IGNORED])
    ids = document_ids(tokens, EOD)
    ours = np.tril(ids[:, None] == ids[None, :])
    # Megatron's mask is True where attention is blocked.
    assert np.array_equal(~ours, attention[0].numpy())


def test_the_eod_is_still_predicted() -> None:
    window = np.array([[5, 6, EOD, 7, EOD]])
    assert mask_eod_labels(window[:, :-1], window[:, 1:], EOD).tolist() == [[6, EOD, IGNORED, EOD]]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_empty_batches_have_no_documents(shape: tuple[int, ...]) -> None:
    rows = np.zeros(shape, np.int64)
    assert document_ids(rows, EOD).shape == restarting_positions(rows, EOD).shape == shape
    assert document_bounds(rows, EOD).tolist() == [0]

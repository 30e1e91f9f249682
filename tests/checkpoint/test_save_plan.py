"""The plan of a save and its index do not grow with the number of ranks, and every element is written once, by a rank that holds it."""

from __future__ import annotations

import math
from pathlib import Path

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint.manifest import TrainProgress, read_checkpoint
from argosy.checkpoint.rank_grid import RankGrid, Spread
from argosy.checkpoint.save import save
from argosy.checkpoint.save_plan import assign_writers, claim, merge_claims
from argosy.checkpoint.stored import index_of, read_index
from argosy.errors import ArgosyError
from argosy.parallel.host_group import HostGroup, children, parent
from argosy.parallel.shards import tiled, whole_box


def planned(pp: int, dp: int, tp: int) -> tuple[bytes, int]:
    """The index of a model of two stages of three matrices and a norm each, on pp x dp x tp ranks; and the largest message."""
    ranks, largest = pp * dp * tp, 0
    cut = [[0, dp, tp], [1, tp, 1]]

    def described(rank: int) -> bytes:
        stage = rank * pp // ranks
        names = [f"layers.{stage}.{part}" for part in ("q", "k", "v")]
        return orjson.dumps(
            [["weights", name, "F32", [4096, 512], cut] for name in names]
            + [
                ["weights", f"layers.{stage}.norm", "F32", [4096], [[0, dp, tp]]],
                ["weights", "tied", "F32", [64, 512], []],
            ]
        )

    def merged(rank: int) -> bytes:
        nonlocal largest
        found = merge_claims([claim(described(rank), rank), *map(merged, children(rank, ranks))])
        largest = max(largest, len(found))
        return found

    return index_of(assign_writers(merged(0)), ranks), largest


def test_messages_and_index_of_64_times_as_many_ranks_are_as_large() -> None:
    few, many = planned(2, 4, 2), planned(2, 64, 8)
    assert len(many[0]) < 1.1 * len(few[0])
    assert many[1] < 1.1 * few[1]


def test_every_element_is_written_once_and_by_each_rank_as_many() -> None:
    ranks, tensors = read_index(planned(2, 4, 2)[0])
    load = [0] * ranks
    for one in tensors["weights"].values():
        parts = one.spread.chunks(whole_box(one.info.shape))
        assert tiled(whole_box(one.info.shape), [box for _, box in parts])
        for rank, box in parts:
            assert box in one.spread.chunks_of(rank)
            load[rank] += box.numel
    assert max(load) < 1.1 * sum(load) / ranks


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_slice_is_found_in_the_files_of_few_ranks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    pieces = data.draw(st.lists(st.integers(1, 4), max_size=2))
    copies = data.draw(st.integers(1, 3))
    strides = [math.prod(pieces[place + 1 :]) for place in range(len(pieces))]
    grid = RankGrid(((0, copies * math.prod(pieces)),), tuple(zip(pieces, strides, strict=True)))
    dims = tuple(data.draw(st.integers(0, len(shape) - 1)) for _ in pieces)
    spread = Spread(shape, grid, dims, data.draw(st.one_of(st.none(), st.integers(0, copies - 1))))
    everything = spread.chunks(whole_box(shape))
    assert tiled(whole_box(shape), [box for _, box in everything])
    wanted = data.draw(st.sampled_from([box for _, box in everything]))
    assert [box for _, box in spread.chunks(wanted)] == [wanted]
    assert {box for rank in range(grid.size) for box in spread.chunks_of(rank)} == {box for _, box in everything}


def test_a_grid_from_which_ranks_are_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="do not hold every piece"):
        RankGrid(((0, 6),), ((4, 1),))


@pytest.mark.parametrize("size", [1, 2, 5, 4096])
def test_every_rank_has_one_parent_and_no_rank_talks_to_many(size: int) -> None:
    assert all(rank in children(parent(rank), size) for rank in range(1, size))
    assert sum(len(children(rank, size)) for rank in range(size)) == size - 1
    assert max(len(children(rank, size)) for rank in range(size)) <= max(1, (size - 1).bit_length())


def test_a_rank_looks_at_its_share_of_the_files_only(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3)}
    path = save(tmp_path, TrainProgress(1, 4), tensors, tensors)
    (path / "optimizer.safetensors").unlink()
    assert min(read_checkpoint(path, HostGroup(1, 3)).files) == "optimizer.safetensors"
    with pytest.raises(ArgosyError, match=r"optimizer\.safetensors is missing"):
        read_checkpoint(path, HostGroup(0, 3))

"""Which rank writes which slice of a tensor, described by the layout: its size does not grow with the number of ranks.

A layout cuts a tensor into cells, along some dimensions one after the other, and a digit of the rank says which piece of a cut the
rank holds: (rank // stride) % pieces. Ranks with equal digits hold the same cell, and are its copies. `RankGrid` is the
arrangement of the ranks, which most tensors of a model share; `Spread` is one tensor on it. Any rank can compute from them which
file holds any slice, and nobody lists the slices of all ranks: of a 175B model on 4,096 ranks there are 14 million.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from argosy.parallel.shards import Box

Ints = NDArray[np.int64]
# More ranks than any job has. An index that names more is damaged.
_MOST_RANKS = 1 << 22


@dataclass(frozen=True)
class RankGrid:
    """The ranks that hold a tensor: half-open ranges of ranks, and (pieces, stride) of each cut.

    Raises:
        ValueError: some cells have more copies than others, as when a rank is missing.
    """

    ranges: tuple[tuple[int, int], ...]
    cuts: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if min((pieces for cut in self.cuts for pieces in cut), default=1) < 1 or self.cells > _MOST_RANKS:
            raise ValueError(f"there are no cuts {list(self.cuts)}")
        ends = [end for one in self.ranges for end in one]
        ascending = all(first < last for first, last in self.ranges) and ends == sorted(ends)
        if not ends or not ascending or not 0 <= ends[0] <= ends[-1] <= _MOST_RANKS:
            raise ValueError(f"there are no ranks {list(self.ranges)}")
        if self.size % self.cells or len(set(np.bincount(self._cell_of, minlength=self.cells).tolist())) > 1:
            raise ValueError(f"ranks {list(self.ranges)} do not hold every piece of the cuts {list(self.cuts)} alike")

    @property
    def cells(self) -> int:
        return math.prod(pieces for pieces, _ in self.cuts)

    @property
    def size(self) -> int:
        return sum(last - first for first, last in self.ranges)

    @property
    def copies(self) -> int:
        """The number of ranks that hold each cell."""
        return self.size // self.cells

    @cached_property
    def _ranks(self) -> Ints:
        return np.concatenate([np.arange(first, last, dtype=np.int64) for first, last in self.ranges])

    @cached_property
    def _cell_of(self) -> Ints:
        cells = np.zeros(len(self._ranks), np.int64)
        for pieces, stride in self.cuts:
            cells = cells * pieces + self._ranks // stride % pieces
        return cells

    @cached_property
    def holders(self) -> Ints:
        """The ranks of each cell, in ascending order [cells, copies]."""
        return self._ranks[np.argsort(self._cell_of, kind="stable")].reshape(self.cells, self.copies)

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the cell that a rank holds, and which of its copies the rank is."""
        cell = 0
        for pieces, stride in self.cuts:
            cell = cell * pieces + rank // stride % pieces
        return cell, int(np.searchsorted(self.holders[cell], rank))


@dataclass(frozen=True)
class Spread:
    """A tensor on a grid of ranks. Each of `dims` is the dimension of a cut.

    writer: the copy that writes its cell; None: the rows of a cell are shared by all its copies.
    """

    shape: tuple[int, ...]
    grid: RankGrid
    dims: tuple[int, ...]
    writer: int | None

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.grid.cuts) or not all(0 <= dim < len(self.shape) for dim in self.dims):
            raise ValueError(f"a tensor of shape {list(self.shape)} is not cut along {list(self.dims)}")
        if self.writer is not None and not 0 <= self.writer < self.grid.copies:
            raise ValueError(f"there is no copy {self.writer} of {self.grid.copies}")

    def chunks(self, wanted: Box) -> list[tuple[int, Box]]:
        """Return (rank that writes it, slice) of the slices that share elements with `wanted`."""
        offsets, shapes = self._cells
        ends = np.array([first + size for first, size in zip(*wanted, strict=True)], np.int64)
        common = np.minimum(offsets + shapes, ends) > np.maximum(offsets, np.array(wanted.offset, np.int64))
        found: list[int] = np.flatnonzero(common.all(axis=1)).tolist()
        pieces = ((rank, box) for cell in found for rank, box in self._pieces(cell))
        return [(rank, box) for rank, box in pieces if box.common(wanted) is not None]

    def chunks_of(self, rank: int) -> list[Box]:
        """Return the slices that a rank writes, one or none."""
        cell, _ = self.grid.place_of(rank)
        return [
            box for writer, box in self._pieces(cell) if writer == rank and (box.numel or not math.prod(self.shape))
        ]

    @cached_property
    def _cells(self) -> tuple[Ints, Ints]:
        """The offset and the shape of every cell [cells, dimensions]. The last pieces of a cut may be shorter, or empty."""
        index, left = np.arange(self.grid.cells), self.grid.cells
        offsets = np.zeros((left, len(self.shape)), np.int64)
        shapes = np.tile(np.array(self.shape, np.int64), (left, 1))
        for dim, (pieces, _) in zip(self.dims, self.grid.cuts, strict=True):
            left //= pieces
            most = -(-shapes[:, dim] // pieces)
            first = np.minimum(index // left % pieces * most, shapes[:, dim])
            offsets[:, dim] += first
            shapes[:, dim] = np.minimum(most, shapes[:, dim] - first)
        return offsets, shapes

    def _cell(self, cell: int) -> Box:
        """Return one cell, without the others."""
        offset, shape, left = [0] * len(self.shape), list(self.shape), self.grid.cells
        for dim, (pieces, _) in zip(self.dims, self.grid.cuts, strict=True):
            left //= pieces
            most = -(-shape[dim] // pieces)
            first = min(cell // left % pieces * most, shape[dim])
            offset[dim] += first
            shape[dim] = min(most, shape[dim] - first)
        return Box(tuple(offset), tuple(shape))

    def _pieces(self, cell: int) -> Iterator[tuple[int, Box]]:
        """Yield (rank, slice) of a cell: the whole by one of its copies, or a share of the rows by each."""
        offset, shape = box = self._cell(cell)
        holders: list[int] = self.grid.holders[cell].tolist()
        if self.writer is not None or not shape:
            yield holders[self.writer or 0], box
            return
        count = max(1, min(len(holders), shape[0]))
        for part, rank in enumerate(holders[:count]):
            first, last = shape[0] * part // count, shape[0] * (part + 1) // count
            yield rank, Box((offset[0] + first, *offset[1:]), (last - first, *shape[1:]))

    @property
    def cell_numel(self) -> int:
        """The number of elements of the largest cell."""
        return self._cell(0).numel

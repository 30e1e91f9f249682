"""Split Parquet tables into blocks of rows.

The footer alone decides the blocks: each is one or more whole row groups, or some rows of a large one. A process starts at
the row group of its block and decodes nothing before it. Memory is bounded by the size of a page, not of a row group: pages
of the requested columns are read through a small buffer and converted to rows a few MiB at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from argosy.data.text.blocks import PIECE, Piece
from argosy.data.text.input_files import open_input, reading
from argosy.data.text.inputs import InputFile, require
from argosy.errors import ArgosyError

# The largest number of rows decoded at a time.
_MAX_ROWS = 4096


@dataclass(frozen=True)
class Span:
    """The rows of one block: rows [skip, skip + rows) of some consecutive row groups."""

    groups: tuple[int, ...]
    skip: int
    rows: int
    # Rows decoded at a time.
    step: int
    # The number of the block's first row in the whole table.
    first_row: int


class TableBlocks:
    """The blocks of a Parquet table. Rows are dictionaries that hold only the columns of `keys`."""

    def __init__(self, file: InputFile, block_bytes: int, keys: Sequence[str], *, if_there: bool = False) -> None:
        """With `if_there`, the table need not have all columns of `keys`."""
        parquet = require("pyarrow.parquet", "data", "reading parquet")
        self.file = file
        with reading([file], " is not a parquet file"):
            # With a small buffer pyarrow streams the pages of a column; without one it holds the whole column of a row group.
            # Columns are read in turns, so the read-ahead of our own buffer must stay small too.
            stored = open_input(file, buffer=1 << 20)
            self._table = parquet.ParquetFile(stored, buffer_size=1 << 20, pre_buffer=False)
        self.keys = [key for key in keys if not if_there or key in self._table.schema_arrow.names]
        for key in self.keys:
            self._check_column(key)
        self._spans = list(_spans(self._table.metadata, self.keys, block_bytes))
        # The row groups that are being decoded, and how many of their rows have been decoded.
        self._groups: tuple[int, ...] | None = None
        self._row = 0

    def block(self, index: int) -> Iterator[Piece] | None:
        return self._pieces(self._spans[index]) if index < len(self._spans) else None

    def _pieces(self, span: Span) -> Iterator[Piece]:
        if self._groups != span.groups or self._row > span.skip:
            self._groups, self._row = span.groups, 0
            self._batches = self._table.iter_batches(
                batch_size=span.step, row_groups=list(span.groups), columns=self.keys, use_threads=False
            )
        while self._row < span.skip:
            self._row += len(self._next_batch())
        stored = self.file.size / max(1, self._table.metadata.num_rows)
        while self._row < span.skip + span.rows:
            for batch in _halved(self._next_batch()):
                first = span.first_row + self._row - span.skip
                self._row += len(batch)
                places, rows = list(range(first, first + len(batch))), batch.to_pylist()
                content = orjson.dumps(rows, default=repr, option=orjson.OPT_NON_STR_KEYS)
                yield Piece(self.file.path, rows, places, round(len(batch) * stored), content)

    def _next_batch(self) -> Any:
        """Decode the next batch of rows. Raise ValueError if the file is damaged or pyarrow cannot read it."""
        from pyarrow.lib import ArrowException  # type: ignore[import-untyped]

        try:
            batch = next(self._batches, None)
        except ArrowException as error:
            raise ValueError(str(error)) from error
        if batch is None:
            raise ValueError("its pages hold fewer rows than its footer says")
        return batch

    def _check_column(self, key: str) -> None:
        fields = {field.name: field for field in self._table.schema_arrow}
        for part in key.split("."):
            if part not in fields:
                raise ArgosyError(
                    "data.bad-input",
                    f"{self.file.path} has no column {key!r}",
                    key="--key",
                    value=key,
                    fix=f"it has: {', '.join(self._table.schema_arrow.names)}",
                )
            kind = fields[part].type
            fields = {kind.field(i).name: kind.field(i) for i in range(kind.num_fields)}


def _halved(batch: Any) -> Iterator[Any]:
    """Halve a batch until each part fits in PIECE bytes. Needed where rows are longer than the mean."""
    if batch.nbytes <= PIECE or len(batch) < 2:
        yield batch
        return
    half = len(batch) // 2
    yield from _halved(batch.slice(0, half))
    yield from _halved(batch.slice(half))


def _spans(metadata: Any, keys: Sequence[str], block_bytes: int) -> Iterator[Span]:
    first_row, small, small_rows, small_bytes = 0, [], 0, 0

    def span(groups: Sequence[int], skip: int, rows: int, size: int, of_rows: int) -> Span:
        step = max(1, min(_MAX_ROWS, min(PIECE, block_bytes) * of_rows // max(1, size)))
        return Span(tuple(groups), skip, rows, step, first_row)

    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        size = _bytes_of(metadata.row_group(group), keys)
        small.append(group)
        small_rows, small_bytes = small_rows + rows, small_bytes + size
        if small_bytes < block_bytes and group < metadata.num_row_groups - 1:
            continue
        cuts = max(1, small_bytes // block_bytes) if len(small) == 1 else 1
        whole = span(small, 0, small_rows, small_bytes, small_rows)
        # A multiple of `step`, so that a block ends at the end of a batch.
        each = -(-small_rows // cuts // whole.step) * whole.step
        for skip in range(0, small_rows, max(1, each)):
            yield span(small, skip, min(each, small_rows - skip), small_bytes, small_rows)
            first_row += min(each, small_rows - skip)
        small, small_rows, small_bytes = [], 0, 0


def _bytes_of(group: Any, keys: Sequence[str]) -> int:
    """Return the decompressed size of the columns that hold the keys in one row group."""
    columns = (group.column(i) for i in range(group.num_columns))
    wanted = (
        c for c in columns if any(c.path_in_schema == key or c.path_in_schema.startswith(f"{key}.") for key in keys)
    )
    return sum(column.total_uncompressed_size for column in wanted)

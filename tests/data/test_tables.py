"""Every row comes out once, in order, at its place, however a table is split; memory is bounded by the page size."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.text import tables
from argosy.data.text.inputs import InputFile, find_inputs
from argosy.data.text.records import Parser
from argosy.data.text.tables import TableBlocks
from argosy.errors import ArgosyError


def write(path: Path, table: dict[str, object], **options: object) -> InputFile:
    pyarrow.parquet.write_table(pyarrow.table(table), path, **options)
    [file] = find_inputs([str(path)])
    return file


def read(file: InputFile, block_bytes: int, wanted: set[int] | None = None) -> dict[int, list[tuple[int, str]]]:
    reader, found, index = TableBlocks(file, block_bytes, ["text"]), {}, 0
    while True:
        if wanted is None or index in wanted:
            pieces = reader.block(index)
            if pieces is None:
                return found
            found[index] = [
                (place, row["text"]) for piece in pieces for place, row in zip(piece.places, piece.records, strict=True)
            ]
        elif index > max(wanted, default=0):
            return found
        index += 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 300), max_size=200),
    st.integers(1, 60),
    st.integers(1, 5000),
    st.integers(1, 2000),
    st.data(),
)
def test_every_row_is_in_exactly_one_block(
    lengths: list[int], group_rows: int, block_bytes: int, piece: int, data: st.DataObject
) -> None:
    texts = [f"{number}:" + "x" * length for number, length in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "PIECE", piece)
        file = write(Path(root) / "t.parquet", {"id": range(len(texts)), "text": texts}, row_group_size=group_rows)
        by_block = read(file, block_bytes)
        assert [pair for index in sorted(by_block) for pair in by_block[index]] == list(enumerate(texts))
        # A worker that gets only some of the blocks reads the same rows in them.
        some = {index for index in by_block if data.draw(st.booleans())}
        assert read(file, block_bytes, some) == {index: by_block[index] for index in some}


def test_a_large_row_group_is_shared_and_small_ones_are_taken_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "PIECE", 20_000)
    texts = {"text": [os.urandom(500).hex() for _ in range(2000)]}
    large = write(tmp_path / "large.parquet", texts, row_group_size=2000)
    assert 8 <= len(read(large, 200_000)) <= 12
    small = write(tmp_path / "small.parquet", texts, row_group_size=10)
    assert 8 <= len(read(small, 200_000)) <= 12


def test_nested_columns_bytes_and_nulls_are_read(tmp_path: Path) -> None:
    rows = [{"body": "one", "other": 1}, {"body": None, "other": 2}, None]
    raw = [b"two", "é".encode(), b"\xff"]
    file = write(tmp_path / "t.parquet", {"meta": rows, "raw": raw, "unused": ["x"] * 3})
    [piece] = TableBlocks(file, 1000, ["meta.body", "raw"]).block(0) or ()
    assert piece.records[0] == {"meta": {"body": "one"}, "raw": b"two"}
    documents, bad = Parser(["meta.body"]).parse(piece)
    assert documents == [[["one"]]]
    assert [(record.offset, record.kind) for record in bad] == [(1, "not-text"), (2, "not-an-object")]
    documents, bad = Parser(["raw"]).parse(piece)
    assert documents == [[["two"], ["é"]]]
    assert [record.kind for record in bad] == ["invalid-utf8"]


@pytest.mark.parametrize("key", ["body", "meta.nothing", "text.more"])
def test_a_column_that_is_not_there_is_refused(tmp_path: Path, key: str) -> None:
    file = write(tmp_path / "t.parquet", {"text": ["x"], "meta": [{"a": 1}]})
    with pytest.raises(ArgosyError, match="no column") as refusal:
        TableBlocks(file, 1000, [key])
    assert "text, meta" in refusal.value.fix


def test_a_row_group_larger_than_the_memory_allowed_is_streamed(tmp_path: Path) -> None:
    """300 MB of text in one row group, read in a process that may grow by 100 MB."""
    texts = [os.urandom(5000).hex() for _ in range(3000)] * 10
    file = write(tmp_path / "t.parquet", {"text": texts}, use_dictionary=False, compression="none")
    script = f"""
import resource
import pyarrow.parquet
from argosy.data.text.inputs import InputFile
from argosy.data.text.tables import TableBlocks
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
blocks, index, rows = TableBlocks(InputFile({file.path!r}, {file.size}), 4 << 20, ["text"]), 0, 0
while (pieces := blocks.block(index)) is not None:
    rows += sum(len(piece.records) for piece in pieces)
    index += 1
print(rows)
"""
    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert run.stdout.strip() == "30000", run.stderr[-2000:]

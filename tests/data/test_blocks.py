"""Every line comes out once, in order, at its offset, however a file is split into blocks."""

from __future__ import annotations

import gzip
import lzma
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from argosy.data.text import blocks
from argosy.data.text.blocks import FileBlocks, LineBlocks
from argosy.data.text.inputs import InputFile, find_inputs
from argosy.errors import ArgosyError

LINES = st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"")), max_size=30)


def write(path: Path, content: bytes) -> InputFile:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".xz":
        # Two streams with padding between them.
        half = len(content) // 2
        path.write_bytes(lzma.compress(content[:half]) + bytes(8) + lzma.compress(content[half:]))
    # Two frames, as from `cat a.zst b.zst`.
    elif path.suffix == ".zst":
        half = len(content) // 2
        compress = zstandard.ZstdCompressor(write_checksum=True).compress
        path.write_bytes(compress(content[:half]) + compress(content[half:]))
    else:
        path.write_bytes(content)
    return InputFile(str(path), path.stat().st_size)


def read(file: InputFile, block_bytes: int, wanted: set[int] | None = None) -> dict[int, list[tuple[int, bytes]]]:
    reader, found, index = LineBlocks(file, block_bytes), {}, 0
    while index < 400:
        if wanted is None or index in wanted:
            pieces = reader.block(index)
            if pieces is None:
                break
            found[index] = [pair for piece in pieces for pair in zip(piece.places, piece.records, strict=True)]
        index += 1
    return found


@settings(max_examples=60, deadline=None)
@given(
    LINES,
    st.booleans(),
    st.integers(1, 70),
    st.integers(1, 50),
    st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.xz"]),
    st.data(),
)
def test_every_line_is_in_exactly_one_block(
    lines: list[bytes], final_newline: bool, block_bytes: int, piece: int, suffix: str, data: st.DataObject
) -> None:
    content = b"\n".join(lines) + (b"\n" if final_newline and lines else b"")
    # A BOM is not text, and has its own test.
    assume(not content.startswith(blocks.BOM))
    expected, at = [], 0
    for line in content.split(b"\n"):
        expected.append((at, line))
        at += len(line) + 1
    if expected and not expected[-1][1]:
        expected.pop()
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "PIECE", piece)
        file = write(Path(root) / f"x{suffix}", content)
        by_block = read(file, block_bytes)
        assert [pair for index in sorted(by_block) for pair in by_block[index]] == expected
        for index, pairs in by_block.items():
            assert all(index * block_bytes <= place < (index + 1) * block_bytes for place, _ in pairs)
        # A worker that gets only some of the blocks reads the same lines in them.
        some = {index for index in by_block if data.draw(st.booleans())}
        assert read(file, block_bytes, some) == {index: by_block[index] for index in some}


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".jsonl.xz"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "not compressed"])
def test_damaged_compression_is_an_error_and_never_a_quiet_end(tmp_path: Path, suffix: str, damage: str) -> None:
    import os

    file = write(tmp_path / f"x{suffix}", os.urandom(50_000).hex().encode() + b"\n")
    content = bytearray(Path(file.path).read_bytes())
    if damage == "cut":
        content = content[:-100]
    elif damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    else:
        content = bytearray(b'{"text": "plain"}\n')
    Path(file.path).write_bytes(content)
    with pytest.raises((OSError, EOFError, __import__("zlib").error)):
        read(InputFile(file.path, len(content)), 1 << 20)


def test_small_text_files_are_documents_of_one_block(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.txt", f"file {i}\nline".encode()) for i in range(3)]
    reader = FileBlocks(files)
    assert [piece.records for piece in reader.block(0) or ()] == [[f"file {i}\nline".encode()] for i in range(3)]
    assert reader.block(1) is None


def test_inputs_are_found_by_directory_and_glob_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.txt", "ignored.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    by_directory = [Path(f.path).name for f in find_inputs([str(tmp_path)])]
    assert by_directory == ["a.jsonl.gz", "b.jsonl", "c.txt"]
    assert [Path(f.path).name for f in find_inputs([str(tmp_path / "*.jsonl*")])] == ["a.jsonl.gz", "b.jsonl"]
    assert [Path(f.path).name for f in find_inputs([str(tmp_path / "**" / "*.txt")])] == ["c.txt"]
    for bad in (str(tmp_path / "ignored.csv"), str(tmp_path / "*.none"), str(tmp_path / "missing.jsonl")):
        with pytest.raises(ArgosyError):
            find_inputs([bad])

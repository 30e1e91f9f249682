"""Split inputs into blocks that can be read independently, so any number of processes and machines can share one input.

Block k of a line-based file holds the lines whose first byte lies in [k x size, (k + 1) x size). A plain file is read from
that offset. A compressed file is decompressed up to that offset, which is far cheaper than tokenizing the skipped text, so
even a single compressed file keeps every core busy. A Parquet table is split by the row groups in its footer. A group of
small text files is one block.

Memory is bounded: a block is read in pieces of a few MiB, and a record longer than MAX_RECORD is reported, not held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from argosy.data.text.input_files import decompressed, open_input
from argosy.data.text.inputs import InputFile

# The unit that is read and tokenized at a time.
PIECE = 1 << 20  # bytes
MAX_RECORD = 64 << 20  # bytes
# The byte-order mark that some editors write at the start of UTF-8 files. It is not text.
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of consecutive records of one file: lines of text, or rows of a table."""

    file: str
    records: list[bytes] | list[dict[str, Any]]
    # The byte offset of each line, or the row number of each row.
    places: list[int]
    # Approximate bytes of the stored (compressed) file, for progress.
    size: int
    # The decompressed bytes, from which the content fingerprint is computed.
    content: bytes
    # Place and size of a last record that was skipped because it is longer than MAX_RECORD.
    too_long: tuple[int, int] | None = None


class Blocks(Protocol):
    """The blocks of one input. They must be read in ascending order."""

    def block(self, index: int) -> Iterator[Piece] | None:
        """Return the pieces of a block, or None past the end."""


class LineBlocks:
    """The blocks of a file with one record per line, plain or compressed."""

    def __init__(self, file: InputFile, block_bytes: int) -> None:
        self.file, self.size = file, block_bytes
        self._raw = open_input(file)
        self._stream = decompressed(self._raw, file)
        # The offset of the next line, in decompressed bytes.
        self._at = 0

    def block(self, index: int) -> Iterator[Piece] | None:
        start, end = index * self.size, (index + 1) * self.size
        if self._at < start:
            if not self._skip_to(start - 1):
                return None
            # Skip the rest of a line that began in an earlier block.
            self._at += self._rest_of_line()[1]
        return self._pieces(end)

    def _pieces(self, end: int) -> Iterator[Piece]:
        while self._at < end:
            start, stored_from = self._at, self._raw.tell()
            data = self._stream.read(min(PIECE, end - start))
            if not data:
                return
            self._at += len(data)
            too_long = None
            if not data.endswith(b"\n"):
                rest, passed = self._rest_of_line()
                self._at += passed
                if rest is None:
                    whole = data.rfind(b"\n") + 1
                    too_long, data = (start + whole, self._at - start - whole), data[:whole]
                else:
                    data += rest
            yield _split(self.file.path, data, start, self._raw.tell() - stored_from, too_long)

    def _skip_to(self, place: int) -> bool:
        """Seek to offset `place`. Return False if the file ends before it."""
        if not self.file.is_compressed:
            self._stream.seek(place)
            self._at = place
            return place < self.file.size
        while self._at < place:
            passed = len(self._stream.read(min(1 << 20, place - self._at)))
            if not passed:
                return False
            self._at += passed
        return True

    def _rest_of_line(self) -> tuple[bytes | None, int]:
        """Return (the rest of this line, its size in bytes). The rest is None if it is longer than MAX_RECORD."""
        held = self._stream.readline(MAX_RECORD)
        passed = len(held)
        if passed < MAX_RECORD or held.endswith(b"\n"):
            return held, passed
        while part := self._stream.readline(1 << 20):
            passed += len(part)
            if part.endswith(b"\n"):
                break
        return None, passed


def _split(name: str, data: bytes, start: int, size: int, too_long: tuple[int, int] | None) -> Piece:
    if start == 0 and data.startswith(BOM):
        data, start = data[len(BOM) :], len(BOM)
    content = data
    records, places, at = [], [], start
    for line in data.split(b"\n"):
        records.append(line)
        places.append(at)
        at += len(line) + 1
    # `split` yields an empty string after the last newline.
    if records and not records[-1]:
        records.pop()
        places.pop()
    return Piece(name, records, places, size, content, too_long)


class FileBlocks:
    """The single block of a group of small text files, each of which is one document."""

    def __init__(self, group: Sequence[InputFile]) -> None:
        self.group = group

    def block(self, index: int) -> Iterator[Piece] | None:
        return None if index else self._pieces()

    def _pieces(self) -> Iterator[Piece]:
        for file in self.group:
            with open_input(file) as raw, decompressed(raw, file) as stream:
                data = stream.read(MAX_RECORD + 1)
            if len(data) > MAX_RECORD:
                yield Piece(file.path, [], [], file.size, data, too_long=(0, file.size))
            else:
                yield Piece(file.path, [data.removeprefix(BOM)], [0], file.size, data)

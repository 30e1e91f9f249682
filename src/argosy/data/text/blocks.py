"""Inputs cut into blocks that can be read independently, so that any number of processes and machines can share them.

Block k of a file of lines holds the lines whose first byte lies in [k x size, (k + 1) x size). A plain file is read at
that place directly; a compressed one is decompressed up to it, which costs far less than tokenising what is skipped, so
that even one compressed file keeps every core busy. A table is cut by what its footer says of its row groups, and read
from there; a group of small text files is cut by files.

Memory is bounded: a block comes in pieces of a few MiB, and a record longer than MAX_RECORD is reported, not held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from argosy.data.text.input_files import decompressed, open_input
from argosy.data.text.inputs import InputFile

PIECE = 1 << 20  # bytes read and tokenised at a time
MAX_RECORD = 64 << 20
BOM = b"\xef\xbb\xbf"  # some editors start UTF-8 files with it; it is not text


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive records of one file: lines, or rows of a table. `places` are byte offsets, or row numbers."""

    file: str
    records: list[bytes] | list[dict[str, Any]]
    places: list[int]
    size: int  # bytes of the file as it is stored, about
    content: bytes  # what was read, decompressed: a fingerprint is made of it
    too_long: tuple[int, int] | None = None  # place and size of a last record that was passed over


class Blocks(Protocol):
    """The blocks of one input. Ask for them in ascending order."""

    def block(self, index: int) -> Iterator[Piece] | None:
        """The pieces of a block, or None past the end."""


class LineBlocks:
    def __init__(self, file: InputFile, block_bytes: int) -> None:
        self.file, self.size = file, block_bytes
        self._raw = open_input(file)
        self._stream = decompressed(self._raw, file)
        self._at = 0  # the offset of the line that is read next

    def block(self, index: int) -> Iterator[Piece] | None:
        start, end = index * self.size, (index + 1) * self.size
        if self._at < start:
            if not self._skip_to(start - 1):
                return None
            self._at += self._rest_of_line()[1]  # of a line that began in an earlier block
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
        """Whether there is anything at `place`; if so, the stream stands there."""
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
        """What is left of this line, or None where it is too long to hold; and how many bytes that was."""
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
    if records and not records[-1]:  # after the last line's end
        records.pop()
        places.pop()
    return Piece(name, records, places, size, content, too_long)


class FileBlocks:
    """Small text files, each a document; all of them one block."""

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

"""Reader and writer of Megatron's indexed dataset format (`.bin/.idx`), byte for byte.

`NAME.bin` holds the tokens of all documents back to back, little-endian, without a header. `NAME.idx` is its index:

    offset  size  content
    0       9     magic MMIDIDX\\0\\0
    9       8     u64 version = 1
    17      1     u8 dtype code
    18      8     u64 N, sequences
    26      8     u64 D, documents + 1
    34      4N    int32 tokens in each sequence
    34+4N   8N    int64 byte offset of each sequence in the .bin
    34+12N  8D    int64 sequence index where each document begins, and N at the end

A sequence is a document unless documents were split into sentences. Tokens are read with `pread`, not through a memory map: a
random read then costs only the requested bytes instead of a read-ahead window, and resident memory does not grow.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from argosy.data.corpus.block_hashes import BlockHasher, blocks_path
from argosy.errors import ArgosyError
from argosy.files import replace_file
from argosy.untrusted import open_regular

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

Tokens = npt.NDArray[Any]
_COPY_TOKENS = 1 << 21
_RESTORE = "restore it from a good copy, or prepare the corpus again; `argosy data verify` names every fault"


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return Megatron's token dtype: uint16 for a vocabulary below 65,500 entries, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


class IndexedReader:
    """A reader of one `.bin/.idx` pair. Opening it checks the two files against each other."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.dtype, sequences, bounds, self._map = _open_index(idx_path(prefix))
        at = HEADER.size
        self.lengths: npt.NDArray[np.int32] = np.frombuffer(self._map, "<i4", sequences, at)
        self.pointers: npt.NDArray[np.int64] = np.frombuffer(self._map, "<i8", sequences, at + 4 * sequences)
        self.document_indices: npt.NDArray[np.int64] = np.frombuffer(self._map, "<i8", bounds, at + 12 * sequences)
        self._check_bounds()
        self.tokens = int(self.pointers[-1]) // self.dtype.itemsize + int(self.lengths[-1]) if sequences else 0
        self._fd = self._open_bin()

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def documents(self) -> int:
        return len(self.document_indices) - 1

    def read(self, start: int, count: int) -> Tokens:
        """Read `count` tokens from token `start` on, across document bounds."""
        size = self.dtype.itemsize
        raw = os.pread(self._fd, count * size, start * size)
        # A network file system may return fewer bytes than requested.
        while len(raw) < count * size:
            more = os.pread(self._fd, count * size - len(raw), start * size + len(raw))
            if not more:
                raise ArgosyError(
                    "data.truncated",
                    f"{bin_path(self.prefix)} ended at byte {start * size + len(raw):,}, where its .idx promises tokens",
                    fix="the file was cut or replaced while in use: restore it, or prepare the corpus again",
                )
            raw += more
        return np.frombuffer(raw, self.dtype)

    def sequence(self, index: int) -> Tokens:
        """Read the tokens of one sequence."""
        return self.read(int(self.pointers[index]) // self.dtype.itemsize, int(self.lengths[index]))

    def token_at_document(self, document: int) -> int:
        """Return the position of a document's first token. `document == documents` gives the end of the file."""
        sequence = int(self.document_indices[document])
        return self.tokens if sequence == self.sequences else int(self.pointers[sequence]) // self.dtype.itemsize

    def close(self) -> None:
        os.close(self._fd)

    def _check_bounds(self) -> None:
        path, bounds = idx_path(self.prefix), self.document_indices
        if len(bounds) == 0 or int(bounds[-1]) != self.sequences:
            last = int(bounds[-1]) if len(bounds) else "nothing"
            raise _bad_index(path, f"its documents end at sequence {last}, but it lists {self.sequences} sequences")
        if int(bounds[0]) != 0 or (bounds[1:] < bounds[:-1]).any():
            raise _bad_index(path, "its document bounds do not rise from 0")
        if self.sequences and int(self.lengths.min()) < 0:
            raise _bad_index(path, f"a sequence has {int(self.lengths.min())} tokens")
        ends = np.cumsum(self.lengths, dtype=np.int64)
        ends *= self.dtype.itemsize
        if self.sequences and (int(self.pointers[0]) != 0 or not np.array_equal(self.pointers[1:], ends[:-1])):
            raise _bad_index(path, "its offsets are not the sums of the lengths before them")

    def _open_bin(self) -> int:
        path = bin_path(self.prefix)
        try:
            with open_regular(path, buffering=0) as file:
                fd = os.dup(file.fileno())
        except OSError as error:
            raise ArgosyError("data.not-found", f"{path} cannot be opened: {error.strerror}", fix=_RESTORE) from None
        found, promised = os.fstat(fd).st_size, self.tokens * self.dtype.itemsize
        if found != promised:
            os.close(fd)
            raise _bad_index(
                idx_path(self.prefix),
                f"it describes {self.tokens:,} tokens of {self.dtype.itemsize} bytes = {promised:,} bytes, "
                f"but {path.name} has {found:,} bytes",
            )
        return fd


def _open_index(path: Path) -> tuple[np.dtype[Any], int, int, mmap.mmap | bytes]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < HEADER.size:
                raise _bad_index(path, f"it has {size} bytes, fewer than its {HEADER.size}-byte header")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ArgosyError("data.bad-index", f"there is no file {path}", fix=_RESTORE) from None
    except OSError as error:
        raise _bad_index(path, f"it cannot be read: {error.strerror}") from None
    magic, version, code, sequences, bounds = HEADER.unpack_from(mapped)
    if magic != MAGIC:
        raise _bad_index(path, "it does not start with Megatron's magic bytes")
    if version != 1 or code not in DTYPES or DTYPES[code].kind == "f":
        raise _bad_index(path, f"version {version} with dtype code {code} is not one that holds token ids")
    promised = HEADER.size + 12 * sequences + 8 * bounds
    if size != promised:
        raise _bad_index(
            path,
            f"{sequences:,} sequences and {bounds:,} document bounds need {HEADER.size} + 12 x {sequences:,} + 8 x "
            f"{bounds:,} = {promised:,} bytes, but the file has {size:,}" + (": truncated" if size < promised else ""),
        )
    return DTYPES[code], sequences, bounds, mapped


def _bad_index(path: Path, what: str) -> ArgosyError:
    return ArgosyError("data.bad-index", f"{path}: {what}", fix="copy the file again, or prepare the corpus again")


@dataclass(frozen=True)
class Written:
    """The counts and hashes of a finished pair, as manifests record them."""

    documents: int
    sequences: int
    tokens: int
    max_token: int
    bin_sha256: str
    idx_sha256: str
    # The hash of the `.blocks` file, if there is one.
    blocks_sha256: str | None = None


class IndexedWriter:
    """A writer of one pair. It writes temporary files, which `finish` renames, the `.idx` last.

    Args:
        prefix: The path of the pair without `.bin` or `.idx`.
        dtype: The dtype of the tokens.
        sync: Call fsync before renaming.
        blocks: Also write the `.blocks` file with the hashes of the blocks.
        mark: A part of the temporary names, needed if another process may write the same pair.
    """

    def __init__(
        self, prefix: Path, dtype: np.dtype[Any], *, sync: bool = True, blocks: bool = False, mark: str = ""
    ) -> None:
        self.prefix, self.dtype, self._sync = prefix, np.dtype(dtype).newbyteorder("<"), sync
        self._blocks = BlockHasher() if blocks else None
        self._bin_temporary = bin_path(prefix).with_suffix(f".bin{mark}.partial")
        self._idx_temporary = idx_path(prefix).with_suffix(f".idx{mark}.partial")
        self._file: BinaryIO = self._bin_temporary.open("wb")
        self._hash = hashlib.sha256()
        self._lengths = array("i")
        self._bounds = array("q", [0])
        self._max_token = 0

    def add_document(self, sequences: Sequence[Tokens]) -> None:
        """Append one document of one or more sequences. A document without tokens keeps its place in the document bounds."""
        filled = [tokens for tokens in sequences if len(tokens)]
        flat = np.concatenate(filled) if filled else np.zeros(0, self.dtype)
        self.add_many(flat, np.array([len(tokens) for tokens in filled], np.int64), np.array([len(filled)]))

    def add_many(self, tokens: Tokens, lengths: Tokens, per_document: Tokens) -> None:
        """Append many documents.

        Args:
            tokens: The tokens of all documents back to back.
            lengths: The number of tokens of each sequence.
            per_document: The number of sequences of each document.
        """
        if len(tokens):
            largest = int(tokens.max())
            if largest > np.iinfo(self.dtype).max or int(tokens.min()) < 0:
                raise ArgosyError(
                    "tokenizer.vocabulary",
                    f"token ids from {int(tokens.min())} to {largest} do not fit in {self.dtype.name}",
                    fix="the tokenizer gives ids beyond its own vocabulary size: use another one",
                )
            self._max_token = max(self._max_token, largest)
        self._append(np.ascontiguousarray(tokens, self.dtype).data.cast("B"), lengths, per_document)

    def add_pair(self, reader: IndexedReader) -> None:
        """Append all documents of another pair of the same dtype, copied in blocks."""
        for start in range(0, reader.tokens, _COPY_TOKENS):
            block = reader.read(start, min(_COPY_TOKENS, reader.tokens - start))
            self.add_many(block, np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._append(memoryview(b""), reader.lengths, np.diff(reader.document_indices))

    def _append(self, data: memoryview, lengths: Tokens, per_document: Tokens) -> None:
        self._file.write(data)
        self._hash.update(data)
        if self._blocks is not None:
            self._blocks.update(data)
        first = len(self._lengths)
        self._lengths.frombytes(np.ascontiguousarray(lengths, np.int32).tobytes())
        self._bounds.frombytes((first + np.cumsum(per_document, dtype=np.int64)).tobytes())

    def finish(self) -> Written:
        """Write the index and rename both files to their final names."""
        self._flush(self._file)
        self._file.close()
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        pointers = (ends - lengths) * self.dtype.itemsize
        header = HEADER.pack(MAGIC, 1, CODES[self.dtype], len(lengths), len(self._bounds))
        index = b"".join(
            (header, lengths.astype("<i4").tobytes(), pointers.astype("<i8").tobytes(), self._bounds.tobytes())
        )
        with self._idx_temporary.open("wb") as file:
            file.write(index)
            self._flush(file)
        blocks_sha256 = None if self._blocks is None else self._write_blocks(self._blocks.finish(), index)
        os.replace(self._bin_temporary, bin_path(self.prefix))
        os.replace(self._idx_temporary, idx_path(self.prefix))
        return Written(
            documents=len(self._bounds) - 1,
            sequences=len(lengths),
            tokens=int(ends[-1]) if len(ends) else 0,
            max_token=self._max_token,
            bin_sha256=self._hash.hexdigest(),
            idx_sha256=hashlib.sha256(index).hexdigest(),
            blocks_sha256=blocks_sha256,
        )

    def _write_blocks(self, of_tokens: bytes, index: bytes) -> str:
        hasher = BlockHasher()
        hasher.update(memoryview(index))
        content = of_tokens + hasher.finish()
        replace_file(blocks_path(self.prefix), content, sync=self._sync)
        return hashlib.sha256(content).hexdigest()

    def _flush(self, file: BinaryIO) -> None:
        file.flush()
        if self._sync:
            os.fsync(file.fileno())

    def abandon(self) -> None:
        """Remove the temporary files. Safe to call after any failure."""
        with contextlib.suppress(OSError):
            self._file.close()
        for temporary in (self._bin_temporary, self._idx_temporary):
            temporary.unlink(missing_ok=True)

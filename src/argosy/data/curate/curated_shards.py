"""Write the shards of a curation: parts in order, without the documents that are duplicates."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from argosy.data.corpus.indexed import IndexedReader, IndexedWriter
from argosy.data.curate.array_file import read_arrays
from argosy.data.curate.curate_work import CurateWork
from argosy.data.curate.curated_part import data_path
from argosy.data.curate.duplicate_search import Duplicates, job_parts
from argosy.data.curate.word_sequence import Integers
from argosy.errors import ArgosyError
from argosy.files import replace_file

_LEVEL = 3


def removed_of(documents: Integers, directory: Path, name: str) -> Integers:
    """Return the places of a part's documents that are duplicates."""
    parts = job_parts(directory)
    number = parts.names.index(name)
    first = int(parts.firsts[number])
    low, high = np.searchsorted(documents, [first, first + parts.documents[number]])
    return documents[low:high] - first


def require_count(directory: Path, name: str, found: int, removed: int = 0) -> None:
    """Refuse a part that does not hold the documents that were counted when it was made."""
    parts = job_parts(directory)
    expected = parts.documents[parts.names.index(name)] - removed
    if found != expected:
        raise ArgosyError(
            "data.corrupt",
            f"part {name} of {directory} holds {max(0, found):,} documents, and {expected:,} were written to it",
            fix="check the file system, then start over with --overwrite",
        )


@dataclass(frozen=True)
class WriteKept:
    """Compress the JSON lines of one part that are no duplicates. It runs in any process."""

    directory: Path
    name: str

    @property
    def path(self) -> Path:
        return self.directory / f"{self.name}.kept"

    def run(self) -> None:
        if self.path.exists():
            return
        removed = removed_of(read_arrays(self.directory / "duplicates")["documents"], self.directory, self.name)
        with data_path(self.directory, self.name, tokens=False).open("rb") as file:
            content = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
        lines = content.split(b"\n")
        require_count(self.directory, self.name, len(lines) - 1)
        for place in removed:
            lines[int(place)] = b""
        kept = b"".join(line + b"\n" for line in lines if line)
        replace_file(self.path, zstandard.ZstdCompressor(level=_LEVEL).compress(kept) if kept else b"", sync=True)


def kept_paths(work: CurateWork, names: list[str]) -> Iterator[WriteKept]:
    """Yield the work of compressing parts."""
    return (WriteKept(work.parts, name) for name in names)


class ShardWriter:
    """The writer of one shard, to which parts are added in order."""

    def __init__(self, work: CurateWork, shard: int, duplicates: Duplicates) -> None:
        self.work, self.name, self.duplicates = work, f"shard-{shard:05d}", duplicates
        self._tokens: IndexedWriter | None = None
        self._documents = 0
        # Where locks fail, another process may be writing the same shard.
        mark = f".{os.urandom(6).hex()}"
        if work.makes_tokens:
            self._tokens = IndexedWriter(work.output / self.name, work.dtype, blocks=True, mark=mark)
            self._path = work.output / f"{self.name}.bin"
        else:
            self._path = work.output / f"{self.name}.jsonl.zst"
            self._temporary = work.output / f"{self.name}.jsonl.zst{mark}.partial"
            self._file = self._temporary.open("wb")
            self._hash = hashlib.sha256()

    def add(self, name: str) -> None:
        """Append the documents of a part that are no duplicates."""
        removed = removed_of(self.duplicates.documents, self.work.parts, name)
        if self._tokens is not None:
            reader = IndexedReader(self.work.parts / f"{name}.0")
            require_count(self.work.parts, name, reader.documents)
            _add_kept(self._tokens, reader, removed)
            return
        content = WriteKept(self.work.parts, name).path.read_bytes()
        documents = _count_lines(content)
        require_count(self.work.parts, name, documents, len(removed))
        self._documents += documents
        self._file.write(content)
        self._hash.update(content)

    def finish(self) -> dict[str, Any]:
        """Finish the shard and return its facts."""
        if self._tokens is not None:
            return asdict(self._tokens.finish()) | {"name": self.name}
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._path)
        size = self._path.stat().st_size
        return {"name": self._path.name, "documents": self._documents, "bytes": size, "sha256": self._hash.hexdigest()}

    def abandon(self) -> None:
        """Remove the temporary files."""
        if self._tokens is not None:
            self._tokens.abandon()
        else:
            self._file.close()
            self._temporary.unlink(missing_ok=True)


def clear_unfinished_shards(output: Path) -> None:
    """Remove the temporary files that killed processes left of shards. Before the job is finished, others may be writing them."""
    for path in output.glob("shard-*.partial"):
        path.unlink(missing_ok=True)


def _count_lines(compressed: bytes) -> int:
    """Return the number of lines of compressed text, or -1 if it is damaged."""
    try:
        chunks = zstandard.ZstdDecompressor().read_to_iter(compressed)
        return sum(chunk.count(b"\n") for chunk in chunks)
    except zstandard.ZstdError:
        return -1


def _add_kept(writer: IndexedWriter, reader: IndexedReader, removed: Integers) -> None:
    if not len(removed):
        writer.add_pair(reader)
    else:
        kept = np.ones(reader.documents, np.bool_)
        kept[removed] = False
        per_document = np.diff(reader.document_indices)
        sequences = np.repeat(kept, per_document)
        tokens = reader.read(0, reader.tokens)[np.repeat(sequences, reader.lengths)]
        writer.add_many(tokens, reader.lengths[sequences], per_document[kept])
    reader.close()

"""The unit of work of `prepare`: one block of input to one finished part, by anyone, in any order, at most once.

A part is a Megatron pair for each key, with its quarantine and its books beside them:

    .parts/00003-000012.0.bin, .0.idx, .quarantine.jsonl, .json

The `.json` is written last, so a part that has it is complete; a part without it is made again. Parts are the same
bytes whoever makes them, which is what makes the corpus independent of workers, machines and restarts.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import orjson

from argosy.data.corpus.indexed import IndexedReader, IndexedWriter, Tokens, bin_path, dtype_for
from argosy.data.text.blocks import Blocks, Piece
from argosy.data.text.engines import Encode
from argosy.data.text.input_files import check_unchanged
from argosy.data.text.inputs import InputFile
from argosy.data.text.readers import open_blocks, read_block
from argosy.data.text.records import BadRecord, Parser, Sentences
from argosy.data.text.tokenizer import Lengths
from argosy.errors import ArgosyError
from argosy.files import replace_file


@dataclass(frozen=True, order=True)
class PartName:
    """Block `block` of input group `group`. Their order is the order of documents in the corpus."""

    group: int
    block: int

    def __str__(self) -> str:
        return f"{self.group:05d}-{self.block:06d}"

    def pair(self, key: int) -> str:
        """Its pair for the `key`-th of the keys."""
        return f"{self}.{key}"


@dataclass(frozen=True)
class PartFacts:
    documents: int  # of each key
    records: int  # in the block, good and bad
    input_bytes: int
    sha256: list[str]  # of each key's .bin, so that a part from before a crash can be believed
    quarantined: dict[str, int]
    files: dict[str, tuple[int, int, int]]  # file -> documents, quarantined, CRC-32 of what was read
    past_end: bool = False  # there is no such block


@dataclass(frozen=True)
class PartOptions:
    """What decides the bytes of a part."""

    keys: tuple[str, ...]
    append_eod: bool
    text_lines: bool
    block_bytes: int


def cannot_write(output: Path, reason: str) -> ArgosyError:
    return ArgosyError(
        "data.write-failed",
        f"{output}: {reason}",
        key="--output",
        value=str(output),
        fix="free some space or choose another --output, then run it again: finished parts are kept",
    )


class PartMaker:
    """Makes parts with one tokenizer; keeps the current input open, since blocks are asked for in ascending order."""

    def __init__(
        self,
        directory: Path,
        encode: Encode,
        vocab_size: int,
        eod: int | None,
        options: PartOptions,
    ) -> None:
        self.directory, self.encode, self.eod, self.options = directory, encode, eod, options
        self.dtype = dtype_for(vocab_size)
        self._open: tuple[int, int, Blocks, Parser] | None = None  # group, next block, its reader and parser

    def make(self, name: PartName, group: list[InputFile]) -> PartFacts:
        """Make the part of a block of `group`, unless it is there. It counts only if the inputs stayed what they were."""
        finished = read_facts(self.directory, name)
        if finished is not None:
            return finished
        blocks, parser = self._reader(name, group)
        pieces = read_block(blocks, name.block, group)
        try:
            if pieces is None:
                facts = PartFacts(0, 0, 0, [], {}, {}, past_end=True)
            else:
                facts = self._write(name, pieces, parser)
            check_unchanged(group)
            replace_file(self.directory / f"{name}.json", orjson.dumps(asdict(facts)))
        except OSError as error:
            raise cannot_write(self.directory.parent, error.strerror or str(error)) from error
        return facts

    def _reader(self, name: PartName, group: list[InputFile]) -> tuple[Blocks, Parser]:
        if self._open is None or self._open[0] != name.group or self._open[1] > name.block:
            options = self.options
            opened = open_blocks(
                group, keys=options.keys, block_bytes=options.block_bytes, text_lines=options.text_lines
            )
        else:
            opened = self._open[2:]
        self._open = (name.group, name.block + 1, *opened)
        return opened

    def _write(self, name: PartName, pieces: Iterator[Piece], parser: Parser) -> PartFacts:
        prefixes = [self.directory / name.pair(key) for key in range(len(self.options.keys))]
        mark = f".{os.urandom(6).hex()}"  # a worker whose job was killed may still be at it
        writers = [IndexedWriter(prefix, self.dtype, sync=False, mark=mark) for prefix in prefixes]
        bad: list[BadRecord] = []
        files: Counter[str] = Counter()
        checksums: dict[str, int] = {}
        input_bytes = 0
        try:
            for piece in pieces:
                checksums[piece.file] = zlib.crc32(piece.content, checksums.get(piece.file, 0))
                documents, faults = parser.parse(piece)
                for writer, of_key in zip(writers, documents, strict=True):
                    self._add(writer, of_key)
                bad.extend(faults)
                files[piece.file] += len(documents[0])
                input_bytes += piece.size
            written = [writer.finish() for writer in writers]
        except BaseException:
            for writer in writers:
                writer.abandon()
            raise
        lines = b"".join(orjson.dumps(asdict(record)) + b"\n" for record in bad)
        replace_file(self.directory / f"{name}.quarantine.jsonl", lines)
        faults_by_file = Counter(record.file for record in bad)
        return PartFacts(
            documents=written[0].documents,
            records=files.total() + len(bad),
            input_bytes=input_bytes,
            sha256=[pair.bin_sha256 for pair in written],
            quarantined=dict(Counter(record.kind for record in bad)),
            files={file: (files[file], faults_by_file[file], checksums[file]) for file in sorted(checksums)},
        )

    def _add(self, writer: IndexedWriter, documents: list[Sentences]) -> None:
        if not documents:
            return
        ids, lengths = self.encode([sentence for document in documents for sentence in document])
        document_of = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
        filled = lengths > 0  # a text of nothing but what the tokenizer drops has no tokens, and no sequence
        lengths = lengths[filled]
        per_document = np.bincount(document_of[filled], minlength=len(documents))
        last = np.cumsum(per_document)[per_document > 0] - 1  # the sequence that ends each document
        tokens, lengths = _append_eod(ids, lengths, last, self.eod)
        writer.add_many(tokens, lengths, per_document)


def _append_eod(ids: Tokens, lengths: Lengths, last: Lengths, eod: int | None) -> tuple[Tokens, Lengths]:
    """Put the end-of-document id after the last sequence of each document."""
    if eod is None:
        return ids, lengths
    ends = np.cumsum(lengths)[last]
    lengths = lengths.copy()
    lengths[last] += 1
    out = np.empty(len(ids) + len(last), ids.dtype)
    eods = ends + np.arange(len(last))
    keep = np.ones(len(out), bool)
    keep[eods] = False
    out[keep] = ids
    out[eods] = eod
    return out, lengths


def clear_unfinished(directory: Path, is_ours: Callable[[PartName], bool]) -> None:
    """What processes that were killed have left of parts."""
    for path in directory.glob("*.partial"):
        group, block = path.name.partition(".")[0].split("-")
        if is_ours(PartName(int(group), int(block))):
            path.unlink(missing_ok=True)


def read_facts(directory: Path, name: PartName) -> PartFacts | None:
    """The books of a part finished by an earlier attempt, or None where it still has to be made. Parts are not synced to
    the disk, so what a power cut left of one is checked before it is believed."""
    try:
        facts = PartFacts(**orjson.loads((directory / f"{name}.json").read_bytes()))
        for key, sha256 in enumerate(facts.sha256):
            prefix = directory / name.pair(key)
            with bin_path(prefix).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    return None
            IndexedReader(prefix).close()
        return facts
    except (OSError, ValueError, TypeError, ArgosyError):
        return None

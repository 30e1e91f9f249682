"""The unit of work of `prepare`: one block of input becomes one part, in any process and any order, at most once.

A part is a Megatron pair for each key, with its quarantined records and its counts beside them:

    .parts/00003-000012.0.bin, .0.idx, .quarantine.jsonl, .json

The `.json` is written last, so a part with a `.json` is complete; a part without one is made again. The bytes of a part do not
depend on the process that makes it, so the corpus does not depend on workers, machines or restarts.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from argosy.data.chat.chat_template import ChatFormat
from argosy.data.corpus.indexed import IndexedReader, IndexedWriter, bin_path, dtype_for
from argosy.data.prepare.content_check import compare_part
from argosy.data.prepare.documents import Documents, Encoder, Parse, TextDocuments
from argosy.data.prepare.resuming import cannot_write
from argosy.data.text.blocks import Blocks, Piece
from argosy.data.text.input_files import check_unchanged
from argosy.data.text.inputs import InputFile
from argosy.data.text.readers import read_block
from argosy.data.text.records import BadRecord
from argosy.errors import ArgosyError
from argosy.files import replace_file


@dataclass(frozen=True, order=True)
class PartName:
    """The part of block `block` of input group `group`. Parts sort in the order of documents in the corpus."""

    group: int
    block: int

    def __str__(self) -> str:
        return f"{self.group:05d}-{self.block:06d}"

    def pair(self, key: int) -> str:
        """Return the name of the pair of the `key`-th key."""
        return f"{self}.{key}"


class CheckedPart(PartName):
    """A finished part whose inputs are read again, to compare their content with what the part was made of."""


@dataclass(frozen=True)
class PartFacts:
    """The counts and checksums of a part: the content of its `.json`."""

    # Documents of each key.
    documents: int
    # Records of the block, good and bad.
    records: int
    input_bytes: int
    # The sha256 of each key's .bin, to verify a part from before a crash.
    sha256: list[str]
    quarantined: dict[str, int]
    # file -> (documents, quarantined records, CRC-32 of the content)
    files: dict[str, tuple[int, int, int]]
    # True if the input has no such block.
    past_end: bool = False


@dataclass(frozen=True)
class PartOptions:
    """The options that determine the bytes of a part."""

    keys: tuple[str, ...]
    append_eod: bool
    text_lines: bool
    block_bytes: int
    # How conversations become text. None: the records are texts.
    chat: ChatFormat | None = None

    def facts(self) -> dict[str, Any]:
        """Return the options as a dictionary. An option that came later is left out where it is not used."""
        return {key: value for key, value in asdict(self).items() if key != "chat" or value is not None}

    @property
    def places_tokens(self) -> bool:
        """True if documents need to know which characters each token came from."""
        return self.chat is not None

    def maker(self, directory: Path, encoder: Encoder | None) -> PartMaker:
        """Return a maker of such parts."""
        if encoder is None:
            raise RuntimeError("parts of a corpus need a tokenizer")
        return PartMaker(directory, self._documents(encoder), encoder.vocab_size, self.keys)

    def _documents(self, encoder: Encoder) -> Documents:
        """Return the kind of documents that the options ask for."""
        if self.chat is not None and encoder.tokenizer is not None:
            from argosy.data.chat.chat_documents import ChatDocuments

            return ChatDocuments(self.chat, encoder.tokenizer, self.block_bytes)
        return TextDocuments(
            encoder.encode, encoder.eod, keys=self.keys, block_bytes=self.block_bytes, text_lines=self.text_lines
        )


class PartMaker:
    """A maker of parts with one tokenizer. It keeps the current input open, because blocks are requested in ascending order."""

    def __init__(self, directory: Path, documents: Documents, vocab_size: int, keys: Sequence[str]) -> None:
        self.directory, self.documents, self.keys = directory, documents, keys
        self.dtype = dtype_for(vocab_size)
        # The open input: (group, next block, reader, parser).
        self._open: tuple[int, int, Blocks, Parse] | None = None

    def make(self, name: PartName, group: list[InputFile]) -> PartFacts | dict[str, Any] | None:
        """Make the part of a block of `group`, unless it exists. Refuse it if the inputs changed meanwhile.

        Returns:
            The facts of the part. For a CheckedPart the result of `compare_part`.
        """
        if isinstance(name, CheckedPart):
            facts_path = self.directory / f"{name}.json"
            return compare_part(facts_path, name.block, lambda: self._reader(name, group)[0], group)
        finished = read_facts(self.directory, name)
        if finished is not None:
            return finished
        blocks, parse = self._reader(name, group)
        pieces = read_block(blocks, name.block, group)
        try:
            if pieces is None:
                facts = PartFacts(0, 0, 0, [], {}, {}, past_end=True)
            else:
                facts = self._write(name, pieces, parse)
            check_unchanged(group)
            replace_file(self.directory / f"{name}.json", orjson.dumps(asdict(facts)))
        except OSError as error:
            raise cannot_write(self.directory.parent, error) from error
        return facts

    def _reader(self, name: PartName, group: list[InputFile]) -> tuple[Blocks, Parse]:
        if self._open is None or self._open[0] != name.group or self._open[1] > name.block:
            opened = self.documents.open(group)
        else:
            opened = self._open[2:]
        self._open = (name.group, name.block + 1, *opened)
        return opened

    def _write(self, name: PartName, pieces: Iterator[Piece], parse: Parse) -> PartFacts:
        prefixes = [self.directory / name.pair(key) for key in range(len(self.keys))]
        # A worker of a killed job may still be writing the same part.
        mark = f".{os.urandom(6).hex()}"
        writers = [IndexedWriter(prefix, self.dtype, sync=False, mark=mark) for prefix in prefixes]
        bad: list[BadRecord] = []
        files: Counter[str] = Counter()
        checksums: dict[str, int] = {}
        input_bytes = 0
        try:
            for piece in pieces:
                checksums[piece.file] = zlib.crc32(piece.content, checksums.get(piece.file, 0))
                documents, faults = parse(piece)
                for writer, of_key in zip(writers, documents, strict=True):
                    if of_key:
                        writer.add_many(*self.documents.encode(of_key))
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


def clear_unfinished(directory: Path, is_ours: Callable[[PartName], bool]) -> None:
    """Remove the temporary files of killed processes, of the parts for which `is_ours` is True."""
    for path in directory.glob("*.partial"):
        group, block = path.name.partition(".")[0].split("-")
        if is_ours(PartName(int(group), int(block))):
            path.unlink(missing_ok=True)


def read_facts(directory: Path, name: PartName) -> PartFacts | None:
    """Return the facts of a part that an earlier attempt finished, or None if it has to be made.

    Parts are not synced to disk, so their checksums are verified in case of a power cut.
    """
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

"""The unit of work of `curate`: one block of input becomes one part with the documents that its own steps keep.

    .parts/00003-000012.jsonl.zst      the documents as JSON lines, or
    .parts/00003-000012.0.bin, .0.idx  their tokens
    .parts/00003-000012.marks          what is needed to compare them with all others
    .parts/00003-000012.heads          where each document came from and how it begins, for the report
    .parts/00003-000012.json           the counts, written last

All steps of a document run in one pass over its text. The bytes of a part do not depend on the process that makes it.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson
import zstandard

from argosy.data.corpus.indexed import IndexedReader, IndexedWriter, bin_path, dtype_for
from argosy.data.curate.curation_step import CurationStep
from argosy.data.curate.document_marks import ComparingStep, Marks, joined_marks
from argosy.data.curate.duplicate_search import write_marks
from argosy.data.curate.text_batch import TextBatch
from argosy.data.prepare.content_check import compare_part
from argosy.data.prepare.documents import Encoder, encode_documents
from argosy.data.prepare.parts import CheckedPart, PartName
from argosy.data.prepare.resuming import cannot_write
from argosy.data.text.blocks import Piece
from argosy.data.text.input_files import check_unchanged
from argosy.data.text.inputs import InputFile
from argosy.data.text.readers import open_blocks, read_block
from argosy.data.text.records import BadRecord, Parser, field_of
from argosy.errors import ArgosyError
from argosy.files import replace_file

# Characters and documents of a batch: enough that calls of numpy cost little. Its arrays take about 60 MB, and 8 kB a document.
BATCH_CHARACTERS, BATCH_DOCUMENTS = 1_000_000, 4096
# A longer document is quarantined: every character takes about 60 bytes while its document is judged.
MOST_CHARACTERS = 8 << 20
# Parts are read once more, so they are compressed quickly; the shards are compressed better.
_PART_LEVEL = 1
HEAD_CHARACTERS = 160


@dataclass(frozen=True)
class Example:
    """A document that a step removed, for the report."""

    step: str
    reason: str
    file: str
    offset: int
    text: str


@dataclass
class CuratedFacts:
    """The counts of a part: the content of its `.json`."""

    documents: int = 0
    # Records of the block: documents, removed and quarantined ones.
    records: int = 0
    input_bytes: int = 0
    sha256: str = ""
    quarantined: dict[str, int] = field(default_factory=dict)
    # step -> reason -> (documents, characters)
    removed: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    # step -> documents whose text it changed
    changed: dict[str, int] = field(default_factory=dict)
    # Characters of all records, and of the documents.
    characters_read: int = 0
    characters: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    # (file, documents, quarantined records, CRC-32 of the content), in the order of the documents.
    files: list[tuple[str, int, int, int]] = field(default_factory=list)
    past_end: bool = False


class PartSink(Protocol):
    """A writer of the documents of a part."""

    def add(self, texts: list[str], fields: list[dict[str, Any]]) -> None: ...

    def finish(self) -> str:
        """Finish the part, and return the sha256 of its data."""

    def abandon(self) -> None: ...


class JsonLines:
    """A part as compressed JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path, self._temporary = path, path.with_name(f"{path.name}.{os.urandom(6).hex()}.partial")
        self._file = self._temporary.open("wb")
        self._compressor = zstandard.ZstdCompressor(level=_PART_LEVEL).compressobj()
        self._hash = hashlib.sha256()

    def add(self, texts: list[str], fields: list[dict[str, Any]]) -> None:
        lines = b"".join(
            orjson.dumps({"text": text} | more | {"text": text}, default=str) + b"\n"
            for text, more in zip(texts, fields, strict=True)
        )
        self._write(self._compressor.compress(lines))

    def finish(self) -> str:
        self._write(self._compressor.flush())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)
        return self._hash.hexdigest()

    def abandon(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._hash.update(content)


class Tokens:
    """A part as a pair of tokens."""

    def __init__(self, prefix: Path, encoder: Encoder) -> None:
        self._writer = IndexedWriter(prefix, dtype_for(encoder.vocab_size), mark=f".{os.urandom(6).hex()}")
        self._encoder = encoder
        self.abandon = self._writer.abandon

    def add(self, texts: list[str], fields: list[dict[str, Any]]) -> None:
        if texts:
            self._writer.add_many(
                *encode_documents([[text] for text in texts], self._encoder.encode, self._encoder.eod)
            )

    def finish(self) -> str:
        return self._writer.finish().bin_sha256


@dataclass(frozen=True)
class CurateOptions:
    """The options that determine the bytes of a part."""

    keys: tuple[str, ...]
    text_lines: bool
    block_bytes: int
    # Fields of a record that are kept beside its text.
    fields: tuple[str, ...]
    # The label of each step, and the step.
    steps: tuple[tuple[str, CurationStep], ...]
    # Examples of each reason.
    examples: int

    @property
    def own_steps(self) -> list[tuple[str, CurationStep]]:
        """The steps that need one document only."""
        return [(label, step) for label, step in self.steps if not step.compares_documents]

    @property
    def comparing(self) -> list[ComparingStep]:
        """The steps that compare documents."""
        return [step for _, step in self.steps if isinstance(step, ComparingStep)]

    @property
    def places_tokens(self) -> bool:
        return False

    def maker(self, directory: Path, encoder: Encoder | None) -> CuratedPartMaker:
        """Return a maker of such parts: tokens with an encoder, else JSON lines."""
        return CuratedPartMaker(directory, encoder, self)


class CuratedPartMaker:
    """A maker of parts. It also does the other work of the job, which needs no state."""

    def __init__(self, directory: Path, encoder: Encoder | None, options: CurateOptions) -> None:
        self.directory, self.encoder, self.options = directory, encoder, options
        # The open input: (group, next block, reader, parser).
        self._open: tuple[int, int, Any, Parser] | None = None

    def make(self, name: Any, group: list[InputFile]) -> Any:
        """Make the part of a block, unless it exists, or do other work."""
        if isinstance(name, CheckedPart):
            return compare_part(
                self.directory / f"{name}.json", name.block, lambda: self._reader(name, group)[0], group
            )
        if not isinstance(name, PartName):
            return name.run()
        finished = read_curated(self.directory, name, tokens=self.encoder is not None)
        if finished is not None:
            return finished
        blocks, parser = self._reader(name, group)
        pieces = read_block(blocks, name.block, group)
        try:
            facts = CuratedFacts(past_end=True) if pieces is None else self._write(name, pieces, parser)
            check_unchanged(group)
            replace_file(self.directory / f"{name}.json", orjson.dumps(asdict(facts)), sync=True)
        except OSError as error:
            raise cannot_write(self.directory.parent, error) from error
        return facts

    def _reader(self, name: PartName, group: list[InputFile]) -> tuple[Any, Parser]:
        if self._open is None or self._open[0] != name.group or self._open[1] > name.block:
            options, wanted = self.options, self.options.fields
            for _, step in options.steps:
                wanted += step.fields()
            keys = tuple(dict.fromkeys((*options.keys, *wanted)))
            blocks, parser = open_blocks(
                group, keys=keys, block_bytes=options.block_bytes, text_lines=options.text_lines
            )
            opened = blocks, parser if parser.paths is None else Parser(options.keys)
        else:
            opened = self._open[2:]
        self._open = (name.group, name.block + 1, *opened)
        return opened

    def _write(self, name: PartName, pieces: Iterator[Piece], parser: Parser) -> CuratedFacts:
        sink: PartSink
        if self.encoder is None:
            sink = JsonLines(data_path(self.directory, name, tokens=False))
        else:
            sink = Tokens(self.directory / name.pair(0), self.encoder)
        run = PartRun(self.options, sink)
        try:
            for piece in pieces:
                run.add(piece, parser)
            facts = run.finish()
        except BaseException:
            sink.abandon()
            raise
        lines = b"".join(orjson.dumps(asdict(record)) + b"\n" for record in run.bad)
        replace_file(self.directory / f"{name}.quarantine.jsonl", lines, sync=True)
        if self.options.comparing:
            write_marks(self.directory, str(name), run.marks())
            heads = zstandard.ZstdCompressor(level=_PART_LEVEL).compress(orjson.dumps(run.heads))
            replace_file(self.directory / f"{name}.heads", heads, sync=True)
        return facts


class PartRun:
    """One part while it is made: documents are collected into batches, judged, and written."""

    def __init__(self, options: CurateOptions, sink: PartSink) -> None:
        self.options, self.sink = options, sink
        self.bad: list[BadRecord] = []
        # (file, offset, beginning of the text) of each document.
        self.heads: list[tuple[str, int, str]] = []
        self._facts = CuratedFacts()
        self._removed: dict[str, dict[str, list[int]]] = {}
        self._changed: Counter[str] = Counter()
        self._files: dict[str, list[int]] = {}
        self._marks: list[list[Marks]] = [[] for _ in options.comparing]
        self._pending: list[tuple[str, int, str, dict[str, Any]]] = []
        self._characters = 0

    def add(self, piece: Piece, parser: Parser) -> None:
        """Take the records of a piece."""
        of_file = self._files.setdefault(piece.file, [0, 0, 0])
        of_file[2] = zlib.crc32(piece.content, of_file[2])
        self._facts.input_bytes += piece.size
        for found in parser.each(piece):
            if isinstance(found, BadRecord):
                self._quarantine(found)
                continue
            place, record, texts = found
            text = "\n".join(texts[0])
            if len(text) > MOST_CHARACTERS:
                detail = f"{len(text):,} characters, more than {MOST_CHARACTERS:,}"
                self._quarantine(BadRecord(piece.file, place, "too-long", detail))
                continue
            self._pending.append((piece.file, place, text, record if isinstance(record, dict) else {}))
            self._characters += len(text)
            if self._characters >= BATCH_CHARACTERS or len(self._pending) >= BATCH_DOCUMENTS:
                self._flush()

    def finish(self) -> CuratedFacts:
        """Judge the last batch, finish the data, and return the facts."""
        self._flush()
        facts = self._facts
        facts.sha256 = self.sink.finish()
        facts.quarantined = dict(Counter(record.kind for record in self.bad))
        facts.removed = {
            step: {reason: (counts[0], counts[1]) for reason, counts in reasons.items()}
            for step, reasons in self._removed.items()
        }
        facts.changed = dict(self._changed)
        facts.files = [(file, *counts) for file, counts in self._files.items()]  # type: ignore[misc]
        return facts

    def marks(self) -> list[Marks]:
        """Return the marks of all documents, for each comparing step."""
        steps = self.options.comparing
        return [joined_marks(marks, step.tables) for marks, step in zip(self._marks, steps, strict=True)]

    def _quarantine(self, record: BadRecord) -> None:
        self.bad.append(record)
        self._facts.records += 1
        self._files[record.file][1] += 1

    def _flush(self) -> None:
        pending, self._pending, self._characters = self._pending, [], 0
        if not pending:
            return
        facts = self._facts
        facts.records += len(pending)
        facts.characters_read += sum(len(text) for _, _, text, _ in pending)
        batch = TextBatch([text for _, _, text, _ in pending], [record for *_, record in pending])
        for label, step in self.options.own_steps:
            if not batch.alive.any():
                break
            result = step.apply(batch)
            for number, reason in result.removed.items():
                self._remove(pending[number], label, reason)
            batch.alive[list(result.removed)] = False
            self._changed[label] += len(result.changed)
            # A new batch pays for its words again, which is worth it once many documents are gone.
            if result.changed or batch.alive.mean() < 0.4:
                living = batch.living()
                pending = [pending[number] for number in living]
                texts = [result.changed.get(number, batch.texts[number]) for number in living]
                batch = TextBatch(texts, [record for *_, record in pending])
        self._keep(pending, batch)

    def _keep(self, pending: list[tuple[str, int, str, dict[str, Any]]], batch: TextBatch) -> None:
        living = batch.living()
        if not living:
            return
        texts = [batch.texts[number] for number in living]
        records = [pending[number][3] for number in living]
        names = self.options.fields
        fields = [{name: value for name in names for value in field_of(record, name)} for record in records]
        self.sink.add(texts, fields)
        for marks, step in zip(self._marks, self.options.comparing, strict=True):
            marks.append(step.mark(batch))
        for number, text in zip(living, texts, strict=True):
            file, place = pending[number][:2]
            self._files[file][0] += 1
            if self._marks:
                self.heads.append((file, place, text[:HEAD_CHARACTERS]))
        self._facts.documents += len(texts)
        self._facts.characters += sum(map(len, texts))

    def _remove(self, document: tuple[str, int, str, dict[str, Any]], label: str, reason: str) -> None:
        file, place, text, _ = document
        counts = self._removed.setdefault(label, {}).setdefault(reason, [0, 0])
        counts[0] += 1
        counts[1] += len(text)
        if counts[0] <= self.options.examples:
            self._facts.examples.append(asdict(Example(label, reason, file, place, text[:HEAD_CHARACTERS])))


def data_path(directory: Path, name: PartName | str, *, tokens: bool) -> Path:
    """Return the data file of a part."""
    return bin_path(directory / f"{name}.0") if tokens else directory / f"{name}.jsonl.zst"


def read_curated(directory: Path, name: PartName, *, tokens: bool) -> CuratedFacts | None:
    """Return the facts of a part that an earlier attempt finished, or None if it has to be made."""
    try:
        facts = CuratedFacts(**orjson.loads((directory / f"{name}.json").read_bytes()))
        if facts.past_end:
            return facts
        with data_path(directory, name, tokens=tokens).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != facts.sha256:
                return None
        if tokens:
            IndexedReader(directory / name.pair(0)).close()
        return facts
    except (OSError, ValueError, TypeError, ArgosyError):
        return None


def read_heads(directory: Path, part: str) -> list[tuple[str, int, str]]:
    """Return where each document of a part came from, and how it begins."""
    content = (directory / f"{part}.heads").read_bytes()
    found: list[tuple[str, int, str]] = orjson.loads(zstandard.ZstdDecompressor().decompressobj().decompress(content))
    return found

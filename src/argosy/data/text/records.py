"""Parse raw records into texts. Each record becomes a document or a bad record with its place and reason; none is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from argosy.data.text.blocks import MAX_RECORD, Piece

Sentences = list[str]


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot become a document. `kind` is counted; `detail` helps the user to repair the record."""

    file: str
    # The offset of its first byte in the decompressed text, or its row number in a table.
    offset: int
    kind: str
    detail: str


class Fault(Exception):
    """The reason why a record is bad: its kind and a detail."""


D = TypeVar("D")
# The documents of each column, and the bad records.
Parsed = tuple[list[list[D]], list[BadRecord]]


def each_record(piece: Piece, parse: Callable[[Any], D]) -> Iterator[tuple[int, D] | BadRecord]:
    """Yield the place of each record and what `parse` makes of it. A record for which it raises `Fault` is bad."""
    for record, place in zip(piece.records, piece.places, strict=True):
        # An empty line is not a record.
        if isinstance(record, bytes) and not record.strip():
            continue
        try:
            yield place, parse(record)
        except Fault as fault:
            yield BadRecord(piece.file, place, *fault.args)
    if piece.too_long is not None:
        place, size = piece.too_long
        yield BadRecord(piece.file, place, "too-long", f"{size:,} bytes, more than {MAX_RECORD:,}")


def parse_piece(piece: Piece, columns: int, documents_of: Callable[[Any], Sequence[D]]) -> Parsed[D]:
    """Return what `documents_of` makes of each record, one document for each column."""
    documents: list[list[D]] = [[] for _ in range(columns)]
    bad: list[BadRecord] = []
    for found in each_record(piece, documents_of):
        if isinstance(found, BadRecord):
            bad.append(found)
            continue
        for column, document in zip(documents, found[1], strict=True):
            column.append(document)
    return documents, bad


def json_record(record: Any) -> Any:
    """Return the value of a JSON line. A row of a table is a value already."""
    if not isinstance(record, bytes):
        return record
    try:
        return orjson.loads(record)
    except orjson.JSONDecodeError as error:
        raise Fault(*_json_fault(record, error)) from None


class Parser:
    """A parser that extracts the text under one or more keys of each record (nested as `meta.body`), or the record itself.

    A record is good only if it has text under every key, so document n of every key comes from the same record.
    """

    def __init__(self, keys: Sequence[str] | None) -> None:
        self.paths = None if keys is None else [key.split(".") for key in keys]

    def parse(self, piece: Piece) -> Parsed[Sentences]:
        """Return the documents of a piece for each key, each a list of one or more sentences, and the bad records."""
        return parse_piece(piece, len(self.paths or (None,)), self._texts)

    def each(self, piece: Piece) -> Iterator[tuple[int, Any, list[Sentences]] | BadRecord]:
        """Yield each record of a piece: its place, the record itself, and its documents for each key; or a bad record."""
        for found in each_record(piece, self._parsed):
            yield found if isinstance(found, BadRecord) else (found[0], *found[1])

    def _parsed(self, record: Any) -> tuple[Any, list[Sentences]]:
        record = record if self.paths is None else json_record(record)
        return record, self._texts(record)

    def _texts(self, record: Any) -> list[Sentences]:
        if self.paths is None:
            return [_sentences(record)]
        record = json_record(record)
        if len(self.paths) == 1:
            return [_sentences(_under(record, self.paths[0]))]
        texts = []
        for path in self.paths:
            try:
                texts.append(_sentences(_under(record, path)))
            except Fault as fault:
                kind, detail = fault.args
                raise Fault(kind, f"{'.'.join(path)}: {detail}") from None
        return texts


def _under(value: Any, path: Sequence[str]) -> Any:
    for depth, part in enumerate(path):
        if not isinstance(value, dict):
            raise Fault("not-an-object", f"{'.'.join(path[:depth]) or 'the record'} is {json_kind(value)}")
        if part not in value:
            raise Fault("missing-key", f"no {part!r} among {', '.join(list(value)[:8])}")
        value = value[part]
    return value


def field_of(record: Any, name: str) -> tuple[Any, ...]:
    """Return the value of a field (nested as `meta.lang`) as a tuple of one, or an empty tuple if the record has no such field."""
    if isinstance(record, dict) and name in record:
        return (record[name],)
    try:
        return (_under(record, name.split(".")),)
    except Fault:
        return ()


def _sentences(value: Any) -> Sentences:
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Fault("invalid-utf8", str(error)) from None
    sentences = value if isinstance(value, list) else [value]
    blank = True
    for sentence in sentences:
        if not isinstance(sentence, str):
            raise Fault("not-text", f"{json_kind(sentence)} where text belongs")
        if "\x00" in sentence:
            raise Fault("nul", f"a NUL character at position {sentence.index(chr(0))}")
        blank = blank and (not sentence or sentence.isspace())
    if blank:
        raise Fault("empty", "no text")
    return sentences


def json_kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    return {"dict": "an object", "list": "a list", "str": "a string"}.get(type(value).__name__, "a number")


def _json_fault(record: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    try:
        record.decode("utf-8")
    except UnicodeDecodeError as utf8_error:
        return "invalid-utf8", str(utf8_error)
    return ("lone-surrogate" if "surrogate" in str(error) else "broken-json"), str(error)


def texts_of(pieces: Iterator[Piece], parser: Parser) -> Iterator[str]:
    """Yield the texts of all good records, to train or to check a tokenizer."""
    for piece in pieces:
        for documents in parser.parse(piece)[0]:
            for sentences in documents:
                yield from sentences

"""From raw records to texts. A record becomes a document or a bad record with its place and its fault; none is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from argosy.data.text.blocks import MAX_RECORD, Piece

Sentences = list[str]


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot become a document. `kind` is what is counted; `detail` is for whoever repairs it."""

    file: str
    offset: int  # of its first byte (in the decompressed text), or its row number in a table
    kind: str
    detail: str


class Parser:
    """Reads the text of each record: of a JSON key (nested as `meta.body`), or the record itself."""

    def __init__(self, key: str | None) -> None:
        self.path = None if key is None else key.split(".")

    def parse(self, piece: Piece) -> tuple[list[Sentences], list[BadRecord]]:
        """The documents of a piece, each a list of one or more sentences, and what could not be used."""
        documents: list[Sentences] = []
        bad: list[BadRecord] = []
        for record, place in zip(piece.records, piece.places, strict=True):
            if isinstance(record, bytes) and not record.strip():
                continue  # an empty line between records is not a record
            fault = self._document(record, documents)
            if fault is not None:
                bad.append(BadRecord(piece.file, place, *fault))
        if piece.too_long is not None:
            end = piece.places[-1] + len(piece.records[-1]) + 1 if piece.places else 0
            bad.append(BadRecord(piece.file, end, "too-long", f"{piece.too_long:,} bytes, more than {MAX_RECORD:,}"))
        return documents, bad

    def _document(self, record: Any, documents: list[Sentences]) -> tuple[str, str] | None:
        """Add the document, or say what is wrong with it: (kind, detail)."""
        if self.path is not None and isinstance(record, bytes):
            try:
                value = orjson.loads(record)
            except orjson.JSONDecodeError as error:
                return _json_fault(record, error)
            for depth, part in enumerate(self.path):
                if not isinstance(value, dict):
                    return (
                        "not-an-object",
                        f"{'.'.join(self.path[:depth]) or 'the record'} is {_json_kind(value)}",
                    )
                if part not in value:
                    return "missing-key", f"no {part!r} among {', '.join(list(value)[:8])}"
                value = value[part]
        elif isinstance(record, bytes):
            try:
                value = record.decode("utf-8")
            except UnicodeDecodeError as error:
                return "invalid-utf8", str(error)
        else:
            value = record
        sentences = value if isinstance(value, list) else [value]
        for sentence in sentences:
            if not isinstance(sentence, str):
                return "not-text", f"{_json_kind(sentence)} where text belongs"
            if "\x00" in sentence:
                return "nul", f"a NUL character at position {sentence.index(chr(0))}"
        sentences = [sentence for sentence in sentences if sentence.strip()]
        if not sentences:
            return "empty", "no text"
        documents.append(sentences)
        return None


def _json_kind(value: object) -> str:
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
    """Good texts only, for training a tokenizer or for a sample to try one on."""
    for piece in pieces:
        for sentences in parser.parse(piece)[0]:
            yield from sentences

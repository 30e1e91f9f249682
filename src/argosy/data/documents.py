"""Documents from files: `.jsonl` (one object a line) and `.txt`. Each record comes out as a document or as a bad
record with its file and byte offset; none is dropped.

JSON is parsed here, record by record, and a line is never held beyond MAX_RECORD bytes, so that one bad or enormous
line costs one record: not the file, not the memory, not the job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import orjson

from argosy.errors import ArgosyError

MAX_RECORD = 256 << 20
SUFFIXES = (".jsonl", ".txt")
TextUnit = Literal["file", "line"]


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    size: int  # bytes of input it took


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot become a document. `kind` is what is counted; `detail` is for whoever repairs it."""

    file: str
    offset: int  # of its first byte in the file
    line: int | None
    kind: str
    detail: str
    size: int


def find_inputs(paths: Sequence[Path]) -> list[Path]:
    """The files meant, in a fixed order; directories stand for the files of known kinds below them."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
            if not inside:
                raise _bad_input(path, f"holds no {' or '.join(SUFFIXES)} file", "give a directory that does")
            found.extend(inside)
        elif not path.exists():
            raise ArgosyError(
                "data.not-found", f"there is no {path}", fix="check the path; shells expand globs, quotes stop them"
            )
        elif path.suffix not in SUFFIXES:
            raise _bad_input(path, f"is not one of {', '.join(SUFFIXES)}", "convert or rename it")
        else:
            found.append(path)
    return found


def read_documents(path: Path, *, key: str, text_unit: TextUnit) -> Iterator[Document | BadRecord]:
    """Every record of one file, in order."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".txt" and text_unit == "file":
                yield _whole_file(file, str(path))
            else:
                yield from _lines(file, str(path), None if path.suffix == ".txt" else key)
    except OSError as error:
        raise _bad_input(path, f"cannot be read: {error.strerror}", "check the file and its permissions") from None


def _whole_file(file: BinaryIO, name: str) -> Document | BadRecord:
    size = os.fstat(file.fileno()).st_size
    if size > MAX_RECORD:
        return BadRecord(name, 0, None, "too-long", f"{size:,} bytes; use --txt-unit line", size)
    raw = file.read()
    return _document(raw, None, name, 0, None, len(raw))


def _lines(file: BinaryIO, name: str, key: str | None) -> Iterator[Document | BadRecord]:
    offset = number = 0
    while raw := file.readline(MAX_RECORD):
        number += 1
        size = len(raw)
        if size == MAX_RECORD and not raw.endswith(b"\n"):
            while rest := file.readline(1 << 20):
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield BadRecord(name, offset, number, "too-long", f"{size:,} bytes, more than {MAX_RECORD:,}", size)
        elif raw.strip():  # an empty line between records is not a record
            yield _document(raw.rstrip(b"\r\n"), key, name, offset, number, size)
        offset += size


def _document(raw: bytes, key: str | None, name: str, offset: int, line: int | None, size: int) -> Document | BadRecord:
    kind, value = _text_of(raw, key)
    if kind is None:
        return Document(value, size)
    return BadRecord(name, offset, line, kind, value, size)


def _text_of(raw: bytes, key: str | None) -> tuple[str | None, str]:
    """(None, text), or (kind of fault, detail)."""
    value: Any
    if key is None:
        try:
            value = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            return "invalid-utf8", str(error)
    else:
        try:
            record = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            return "broken-json", str(error)
        if not isinstance(record, dict):
            return "not-an-object", f"a JSON {type(record).__name__}, not an object"
        if key not in record:
            return "missing-key", f"no {key!r} among {', '.join(list(record)[:8])}"
        value = record[key]
        if not isinstance(value, str):
            return "not-text", f"{key!r} is a JSON {type(value).__name__}, not a string"
    if not value.strip():
        return "empty", "no text"
    return None, value


def _bad_input(path: Path, what: str, fix: str) -> ArgosyError:
    return ArgosyError("data.bad-input", f"{path} {what}", fix=fix)

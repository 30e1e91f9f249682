"""A local copy of the records of runs that are elsewhere, which every command for a run directory can read.

`update` copies what is new: of growing files the bytes that were added, of other files all of them. Of a checkpoint's weights it
makes empty files of the right size, which occupy no disk. What the other side names is checked: nothing is written outside the
copy, and only files of a record have content.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import orjson

from argosy.files import replace_file
from argosy.record.record_server import MOST_BYTES, MOST_FILES, is_record

# Asks the server for a path with a query.
Fetch = Callable[[str, Sequence[tuple[str, str]]], bytes]
# (size, time of change, inode)
_Version = tuple[int, int, int]
# Of a longer log only this many bytes of its end are copied.
_LOG_BYTES = 1 << 20
_LARGEST = 1 << 50


class RecordMirror:
    """The copy of all runs of a directory, or of one, below `root`."""

    def __init__(self, fetch: Fetch, root: Path, run: str | None = None) -> None:
        self._fetch, self._root, self._run = fetch, root, run
        # What was copied of each file: its version then, and the offset up to which it was read.
        self._copied: dict[str, tuple[_Version, int]] = {}

    def update(self) -> list[str]:
        """Copy what has changed, and return the names of the runs."""
        listed = _checked(orjson.loads(self._fetch("list", [] if self._run is None else [("run", self._run)])))
        self._forget({name for name in self._copied if name not in listed})
        wanted: dict[str, tuple[_Version, int]] = {}
        for name, version in listed.items():
            before, offset = self._copied.get(name, ((0, 0, 0), 0))
            if before == version and name in self._copied:
                continue
            if not is_record(name.partition("/")[2]):
                self._stand_in(name, version)
                continue
            grows = name.endswith((".jsonl", ".log"))
            again = not grows or version[2] != before[2] or version[0] < offset
            if again:
                (self._root / name).unlink(missing_ok=True)
                offset = max(0, version[0] - _LOG_BYTES) if name.endswith(".log") else 0
            wanted[name] = (version, offset)
        self._read(wanted)
        return sorted({name.partition("/")[0] for name in listed})

    def _read(self, wanted: dict[str, tuple[_Version, int]]) -> None:
        """Read the files from their offsets up to the sizes that were listed, many in each request."""
        whole: dict[str, bytearray] = {}
        while wanted:
            names = list(wanted)[:MOST_FILES]
            answer = self._fetch("read", [("part", f"{wanted[name][1]}:{name}") for name in names])
            head, _, body = answer.partition(b"\n")
            for name, length in zip(names, orjson.loads(head), strict=True):
                part, body = body[:length], body[length:]
                version, offset = wanted.pop(name)
                offset += len(part)
                whole.setdefault(name, bytearray()).extend(part)
                if len(part) == MOST_BYTES and offset < version[0]:
                    wanted[name] = (version, offset)
                else:
                    self._write(name, bytes(whole.pop(name)), version, offset)

    def _write(self, name: str, content: bytes, version: _Version, offset: int) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith((".jsonl", ".log")):
            with path.open("ab") as file:
                file.write(content)
        else:
            replace_file(path, content)
        os.utime(path, ns=(version[1], version[1]))
        self._copied[name] = (version, offset)

    def _stand_in(self, name: str, version: _Version) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(version[0])
        os.utime(path, ns=(version[1], version[1]))
        self._copied[name] = (version, 0)

    def _forget(self, gone: set[str]) -> None:
        for name in gone:
            (self._root / name).unlink(missing_ok=True)
            del self._copied[name]
            # A checkpoint that was deleted leaves no empty directory.
            folder = self._root / name
            while (folder := folder.parent) != self._root and folder.is_dir() and not any(folder.iterdir()):
                shutil.rmtree(folder, ignore_errors=True)


def _checked(listed: Mapping[str, Any]) -> dict[str, _Version]:
    """Return the files by name, `RUN/PATH`, without names that could lead out of the copy and sizes that cannot be."""
    found: dict[str, _Version] = {}
    for run, files in listed.items():
        for path, size, changed, inode in files:
            name = f"{run}/{path}"
            inside = PurePosixPath(name).parts == tuple(name.split("/")) and ".." not in name.split("/")
            if inside and re.fullmatch(r"[^/\0]+", run) and "\0" not in name and 0 <= size < _LARGEST:
                found[name] = (int(size), int(changed), int(inode))
    return found

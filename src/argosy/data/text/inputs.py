"""The files a corpus is made from: local paths, globs and directories, or remote ones through fsspec.

Remote names carry a scheme (`s3://`, `gs://`, `az://`, `https://`, `hf://`); credentials come from the environment,
never from the name. The order of the files is fixed by their names, so that the same inputs give the same corpus.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from argosy.errors import ArgosyError

LINES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".json.gz", ".jsonl.zstd")
TEXT = (".txt", ".txt.zst", ".txt.gz")
TABLES = (".parquet",)
SUFFIXES = LINES + TEXT + TABLES
_MADE_BY_US = ("manifest.json", ".parts")  # a directory with one of these is a corpus, not an input


@dataclass(frozen=True)
class InputFile:
    """One file, with the size it had when it was listed."""

    path: str
    size: int

    @property
    def is_remote(self) -> bool:
        return "://" in self.path

    @property
    def is_known(self) -> bool:
        return self.path.endswith(SUFFIXES)

    @property
    def is_table(self) -> bool:
        return self.path.endswith(TABLES)

    @property
    def is_text(self) -> bool:
        return self.path.endswith(TEXT)

    @property
    def is_compressed(self) -> bool:
        return self.path.endswith((".zst", ".zstd", ".gz"))


def find_inputs(names: Sequence[str], report: Callable[[str], None] | None = None) -> list[InputFile]:
    """The files meant, in a fixed order; directories and globs stand for the files of known kinds they hold, and what
    else they hold is reported."""
    found: list[InputFile] = []
    for name in names:
        found.extend(_remote(name) if "://" in name else _local(name, report))
    if not found:
        raise ArgosyError("data.bad-input", "no input was named", fix="give files, directories or globs")
    return found


def open_input(file: InputFile) -> BinaryIO:
    """The bytes as stored, seekable."""
    if not file.is_remote:
        return Path(file.path).open("rb")
    return cast(BinaryIO, _fsspec().open(file.path, "rb", block_size=8 << 20).open())


def decompressed(raw: BinaryIO, file: InputFile) -> BinaryIO:
    """The bytes of a file as its name says they are compressed, or as they are. Reads forward only."""
    if not file.is_compressed:
        return raw
    if file.path.endswith(".gz"):
        import gzip

        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    return cast(BinaryIO, io.BufferedReader(ZstdStream(raw, file.path), buffer_size=1 << 20))


class ZstdStream(io.RawIOBase):
    """A zstandard file of one or more frames, decompressed; a file cut short is an error, never a quiet end."""

    def __init__(self, raw: BinaryIO, name: str) -> None:
        import zstandard

        self._raw, self._name, self._codec = raw, name, zstandard
        self._frame = self._new_frame()
        self._compressed, self._ready, self._in_frame = b"", memoryview(b""), False

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._ready:
            if not self._compressed:
                self._compressed = self._raw.read(1 << 20)
                if not self._compressed:
                    if self._in_frame:
                        raise EOFError(f"{self._name} ends in the middle of a zstandard frame")
                    return 0
            self._decompress()
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self) -> None:
        try:
            self._ready = memoryview(self._frame.decompress(self._compressed))
        except self._codec.ZstdError as error:
            raise OSError(f"{self._name} is not zstandard data: {error}") from None
        self._in_frame, self._compressed = True, b""
        if self._frame.eof:
            self._compressed, self._frame, self._in_frame = self._frame.unused_data, self._new_frame(), False

    def _new_frame(self) -> Any:
        return self._codec.ZstdDecompressor().decompressobj()


def require(module: str, extra: str, purpose: str) -> Any:
    """Import an optional library, or say which extra installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ArgosyError(
            "data.missing-extra",
            f"{purpose} needs the Python package {module.partition('.')[0]}",
            fix=f"pip install 'argosy[{extra}]'",
        ) from None


def _fsspec() -> Any:
    return require("fsspec", "remote", "reading remote files")


def require_no_texts(output: Path, ours: str) -> None:
    """Refuse to make a corpus among texts: as parts of a corpus they would never be found again, and could be replaced."""
    texts = sorted(p.name for p in output.glob("*") if p.name.endswith(SUFFIXES) and p.name != ours)
    if texts:
        cause = f"{output} holds texts, such as {texts[0]}, and a corpus needs a directory of its own"
        fix = f"--output {output / 'corpus'}"
        raise ArgosyError("data.bad-input", cause, key="--output", value=str(output), fix=fix)


def _local(name: str, report: Callable[[str], None] | None) -> list[InputFile]:
    path = Path(name)
    if path.is_dir():
        corpora = {p.parent for name in _MADE_BY_US for p in path.rglob(name)}
        files = [p for p in path.rglob("*") if p.is_file() and not corpora.intersection(p.parents)]
        inside = sorted(p for p in files if p.name.endswith(SUFFIXES) and not p.name.startswith("."))
        if report is not None and len(inside) < len(files):
            other = sorted(set(files) - set(inside))
            report(f"{name}: {len(other)} files of other kinds are passed over, such as {other[0].name}")
        return require_known([InputFile(str(p), p.stat().st_size) for p in inside], name)
    if path.is_file():
        return require_known([InputFile(name, path.stat().st_size)] if name.endswith(SUFFIXES) else [], name)
    if any(character in name for character in "*?["):
        root = Path(path.anchor) if path.is_absolute() else Path()
        pattern = str(path.relative_to(path.anchor)) if path.is_absolute() else name
        matches = sorted(p for p in root.glob(pattern) if p.is_file() and p.name.endswith(SUFFIXES))
        return require_known([InputFile(str(p), p.stat().st_size) for p in matches], name)
    raise ArgosyError("data.not-found", f"there is no {name}", fix=f"check the path; {Path.cwd()} is where it begins")


def _remote(name: str) -> list[InputFile]:
    fsspec = _fsspec()
    try:
        system, path = fsspec.core.url_to_fs(name)
        scheme = name.partition("://")[0]
        if any(character in path for character in "*?["):
            entries = system.glob(path, detail=True)
        elif system.isdir(path):
            entries = system.find(path, detail=True)
        else:
            entries = {path: system.info(path)}
    except ImportError as error:
        raise ArgosyError("data.missing-extra", f"{name}: {error}", fix="pip install 'argosy[remote]'") from None
    except Exception as error:
        raise ArgosyError(
            "data.not-found",
            f"{name} cannot be listed: {error or type(error).__name__}",
            fix="check the name, and the store's credentials in the environment",
        ) from error
    files = [
        InputFile(path if "://" in path else f"{scheme}://{path}", int(info.get("size") or 0))
        for path, info in sorted(entries.items())
        if info.get("type", "file") == "file" and path.endswith(SUFFIXES)
    ]
    return require_known(files, name)


def require_known(files: list[InputFile], name: str) -> list[InputFile]:
    """`files`, those of known kinds that `name` stands for, if there is one."""
    if not files:
        raise ArgosyError(
            "data.bad-input", f"{name} is or holds no file of a known kind", fix=f"known: {', '.join(SUFFIXES)}"
        )
    for file in files:
        named = os.fsencode(file.path)
        if named.decode(errors="replace") != file.path:
            cause = f"the name {named!r} is not UTF-8, and a corpus keeps the names of its inputs as text"
            raise ArgosyError("data.bad-input", cause, fix="rename the file")
    return files


def group_inputs(files: Sequence[InputFile], text_lines: bool) -> list[list[InputFile]]:
    """Each file alone, but for text files that are one document each: those are taken together up to a block's size."""
    groups: list[list[InputFile]] = []
    room = 0
    for file in files:
        together = file.is_text and not text_lines
        if together and groups and room >= file.size and groups[-1][0].is_text:
            groups[-1].append(file)
            room -= file.size
        else:
            groups.append([file])
            room = (8 << 20) - file.size if together else 0
    return groups

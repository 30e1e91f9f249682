"""List the input files of a corpus: local paths, globs and directories, or remote URLs.

Remote names have a scheme (`s3://`, `gs://`, `az://`, `https://`, `hf://`). Credentials come from the environment, never
from the name. Files are sorted by name, so the same inputs give the same corpus. Each file carries the fingerprint it had
when it was listed; `argosy.data.text.input_files` refuses a file whose fingerprint changes later.
"""

from __future__ import annotations

import codecs
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from argosy.errors import ArgosyError
from argosy.extras import install_extra
from argosy.files import mounts_of

COMPRESSED = (".zst", ".zstd", ".gz", ".xz")
LINES = (".jsonl", *(f".jsonl{suffix}" for suffix in COMPRESSED), ".json.gz", ".json.xz")
TEXT = (".txt", ".txt.zst", ".txt.gz", ".txt.xz")
TABLES = (".parquet",)
SUFFIXES = LINES + TEXT + TABLES
# A directory that contains one of these is a corpus, not an input.
_CORPUS_MARKERS = ("manifest.json", ".parts")


@dataclass(frozen=True)
class InputFile:
    """An input file, with the fingerprint it had when it was listed.

    Args:
        path: The name that the user gave. The manifest records it.
        size: The stored size in bytes.
        version: The modification time of a local file; the ETag, generation, hash or time of a remote one. It changes when
            the content does. Empty if unknown: then only the size is compared.
        inode: The inode of a local file; 0 where the file system has no stable inodes.
        address: Where the bytes are read if not at `path`: a URL, or the path of a local copy.
        as_text: Read the file as text although its suffix is not known (`--as text`).
    """

    path: str
    size: int
    version: str = ""
    inode: int = 0
    address: str = ""
    # Read as text whatever the suffix.
    as_text: bool = False

    @property
    def location(self) -> str:
        return self.address or self.path

    @property
    def is_remote(self) -> bool:
        return "://" in self.location

    @property
    def is_copy(self) -> bool:
        """True if the bytes are read from a private local copy that nobody else changes."""
        return bool(self.address) and not self.is_remote

    @property
    def is_known(self) -> bool:
        return self.as_text or self.path.endswith(SUFFIXES)

    @property
    def is_table(self) -> bool:
        return self.path.endswith(TABLES)

    @property
    def is_text(self) -> bool:
        return self.as_text or self.path.endswith(TEXT)

    @property
    def is_compressed(self) -> bool:
        return self.path.endswith(COMPRESSED)


def find_inputs(
    names: Sequence[str], report: Callable[[str], None] | None = None, *, as_text: bool = False
) -> list[InputFile]:
    """List the input files that `names` stand for, in a fixed order.

    Args:
        names: Files, directories, globs or URLs. Directories and globs expand to the files with a known suffix.
        report: A function that receives a message about files in a directory that are skipped.
        as_text: Also take files of other kinds that hold UTF-8 text, such as .md, .html and .py.
    """
    found: list[InputFile] = []
    for name in names:
        local = name.removeprefix("file://")
        found.extend(_remote(name, report, as_text) if "://" in local else _local(local, report, as_text))
    if not found:
        raise ArgosyError("data.bad-input", "no input was named", fix="give files, directories or globs")
    return found


def require(module: str, extra: str, purpose: str) -> Any:
    """Import an optional library. If it is missing, the error names the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ArgosyError(
            "data.missing-extra",
            f"{purpose} needs the Python package {module.partition('.')[0]}",
            fix=install_extra(extra),
        ) from None


def require_no_texts(output: Path, ours: str) -> None:
    """Refuse an output directory that holds input texts: they would be taken for files of the corpus and could be overwritten."""
    texts = sorted(p.name for p in output.glob("*") if p.name.endswith(SUFFIXES) and p.name != ours)
    if texts:
        cause = f"{output} contains input texts such as {texts[0]}; a corpus needs its own directory"
        fix = f"--output {output / 'corpus'}"
        raise ArgosyError("data.bad-input", cause, key="--output", value=str(output), fix=fix)


def local_input(path: str) -> InputFile:
    """Return the local file at `path` with its current fingerprint."""
    facts = os.stat(path)
    inode = facts.st_ino if _keeps_inodes(facts.st_dev) else 0
    return InputFile(path, facts.st_size, f"mtime={np.datetime64(facts.st_mtime_ns, 'ns')}", inode)


@lru_cache(maxsize=64)
def _keeps_inodes(device: int) -> bool:
    """Return False for FUSE mounts: FUSE file systems over object stores assign a new inode at each lookup."""
    return not any(mount.kind.startswith("fuse") for mount in mounts_of(device))


def _is_text(path: Path) -> bool:
    """Return whether the beginning of a file is UTF-8 text."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 13)
    except OSError:
        return False
    try:
        # A character may be cut at the end of what was read.
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _local(name: str, report: Callable[[str], None] | None, as_text: bool) -> list[InputFile]:
    path = Path(name)

    def known(file: Path) -> bool:
        return file.name.endswith(SUFFIXES) or (as_text and _is_text(file))

    def listed(file: str) -> InputFile:
        return replace(local_input(file), as_text=not file.endswith(SUFFIXES))

    if path.is_dir():
        corpora = {p.parent for name in _CORPUS_MARKERS for p in path.rglob(name)}
        files = [p for p in path.rglob("*") if p.is_file() and not corpora.intersection(p.parents)]
        inside = sorted(p for p in files if not p.name.startswith(".") and known(p))
        if report is not None and len(inside) < len(files):
            other = sorted(set(files) - set(inside))
            report(f"{name}: {len(other)} files of other kinds are skipped, such as {other[0].name}")
        return require_known([listed(str(p)) for p in inside], name)
    if path.is_file():
        return require_known([listed(name)] if known(path) else [], name)
    if any(character in name for character in "*?["):
        root = Path(path.anchor) if path.is_absolute() else Path()
        pattern = str(path.relative_to(path.anchor)) if path.is_absolute() else name
        matches = sorted(p for p in root.glob(pattern) if p.is_file() and known(p))
        return require_known([listed(str(p)) for p in matches], name)
    raise ArgosyError(
        "data.not-found", f"there is no {name}", fix=f"check the path; relative paths start at {Path.cwd()}"
    )


def _remote(name: str, report: Callable[[str], None] | None, as_text: bool) -> list[InputFile]:
    # Imported late: it needs packages that local inputs do not.
    from argosy.data.remote.remote_inputs import find_remote

    files = (replace(file, as_text=as_text and not file.is_known) for file in find_remote(name, report))
    return require_known([file for file in files if file.is_known], name)


def require_known(files: list[InputFile], name: str) -> list[InputFile]:
    """Return `files`. Refuse an empty list, and file names that are not UTF-8.

    Args:
        files: The files with a known suffix that `name` stands for.
        name: The input as the user named it, for the error.
    """
    if not files:
        raise ArgosyError(
            "data.bad-input",
            f"{name} has no file of a supported type",
            fix=f"supported: {', '.join(SUFFIXES)}; `--as text` reads other UTF-8 files, such as .md, .html and .py, as they are",
        )
    for file in files:
        named = os.fsencode(file.path)
        if named.decode(errors="replace") != file.path:
            cause = f"the name {named!r} is not UTF-8, and a corpus keeps the names of its inputs as text"
            raise ArgosyError("data.bad-input", cause, fix="rename the file")
    return files


def group_inputs(files: Sequence[InputFile], text_lines: bool) -> list[list[InputFile]]:
    """Group input files into units of work: one file each, but text files that are one document each are grouped up to 8 MiB."""
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

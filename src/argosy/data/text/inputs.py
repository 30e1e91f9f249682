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

from argosy.data.text.input_directory import (
    DANGLING,
    DIRECTORY,
    FILE,
    Entry,
    Tree,
    dangling,
    entry_at,
    has_wildcard,
    matching,
    unreadable,
    walk,
)
from argosy.errors import ArgosyError
from argosy.extras import install_extra
from argosy.files import mounts_of

Report = Callable[[str], None] | None
COMPRESSED = (".zst", ".zstd", ".gz", ".xz")
LINES = (".jsonl", *(f".jsonl{suffix}" for suffix in COMPRESSED), ".json.gz", ".json.xz")
TEXT = (".txt", ".txt.zst", ".txt.gz", ".txt.xz")
TABLES = (".parquet",)
SUFFIXES = LINES + TEXT + TABLES
# A directory that contains one of these is a corpus, not an input.
_CORPUS_MARKERS = frozenset({"manifest.json", ".parts"})


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
        ctime: The time in ns at which a local file or its facts (rights, name, links) last changed; 0 if unknown. It alone does not
            show that the content changed.
    """

    path: str
    size: int
    version: str = ""
    inode: int = 0
    address: str = ""
    # Read as text whatever the suffix.
    as_text: bool = False
    ctime: int = 0

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
    names: Sequence[str], report: Report = None, *, as_text: bool = False, may_repeat: bool = False
) -> list[InputFile]:
    """List the input files that `names` stand for, in a fixed order.

    Args:
        names: Files, directories, globs or URLs. Directories and globs expand to the files with a known suffix.
        report: A function that receives a message about files in a directory that are skipped.
        as_text: Also take files of other kinds that hold UTF-8 text, such as .md, .html and .py.
        may_repeat: Accept a file that is named twice.

    Raises:
        ArgosyError: `data.not-found` or `data.bad-input`, also if part of an input cannot be read or a file is named twice.
    """
    by_name: list[tuple[str, list[InputFile]]] = []
    for name in names:
        local = name.removeprefix("file://")
        by_name.append((name, _remote(name, report, as_text) if "://" in local else _local(local, report, as_text)))
    found = [file for _, files in by_name for file in files]
    if not found:
        raise ArgosyError("data.bad-input", "no input was named", fix="give files, directories or globs")
    # One name stands for each of its files once.
    if len(names) > 1 and not may_repeat:
        _require_once(by_name)
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
    version = f"mtime={np.datetime64(facts.st_mtime_ns, 'ns')}"
    return InputFile(path, facts.st_size, version, inode, ctime=facts.st_ctime_ns)


@lru_cache(maxsize=64)
def _keeps_inodes(device: int) -> bool:
    """Return False for FUSE mounts: FUSE file systems over object stores assign a new inode at each lookup."""
    return not any(mount.kind.startswith("fuse") for mount in mounts_of(device))


def _is_text(path: Path) -> bool:
    """Return whether the beginning of a file is UTF-8 text."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 13)
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        # A character may be cut at the end of what was read.
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _local(name: str, report: Report, as_text: bool) -> list[InputFile]:
    path, tell = Path(name), report or (lambda text: None)
    entry = entry_at(path)
    if entry is not None and entry.kind == DIRECTORY:
        tree = walk(entry, is_pruned=lambda names: not _CORPUS_MARKERS.isdisjoint(names))
        _tell_links(name, tree, tell)
        candidates = tree.others
    elif entry is not None:
        candidates = [entry]
    elif has_wildcard(name):
        matches = matching(name)
        candidates = [match for match in matches if match.kind != DIRECTORY]
        _tell_directories(name, matches, tell)
    else:
        raise ArgosyError(
            "data.not-found", f"there is no {name}", fix=f"check the path; relative paths start at {Path.cwd()}"
        )
    is_named = candidates == [entry]
    wanted = (each for each in candidates if entry is None or is_named or not each.path.name.startswith("."))
    known = [each for each in wanted if _is_data(each, as_text, is_named)]
    if len(known) < len(candidates) and not is_named:
        other = min({each.path for each in candidates}.difference(each.path for each in known))
        tell(f"{name}: {len(candidates) - len(known)} files of other kinds are skipped, such as {other.name}")
    if is_named:
        names = [name] if known else []
    else:
        # Paths do not sort as strings do: a/b comes before a-b/c.
        names = [str(path) for path in sorted(each.path for each in _once(name, known, tell))]
    return require_known([_listed(each) for each in names], name)


def _listed(path: str) -> InputFile:
    try:
        return replace(local_input(path), as_text=not path.endswith(SUFFIXES))
    except OSError as error:
        raise unreadable(Path(path), error) from None


def _is_data(entry: Entry, as_text: bool, is_named: bool) -> bool:
    """Return whether a file is an input. Refuse what looks like one and cannot be read.

    Args:
        entry: The file.
        as_text: Take files of other kinds that hold UTF-8 text as well.
        is_named: The user named the file itself, not a directory or pattern.
    """
    name = entry.path.name
    if entry.kind == DANGLING:
        # Editors leave hidden ones as locks. Another may have been a file, or a directory of files.
        if name.startswith(".") and not is_named:
            return False
        raise dangling(entry.path)
    if entry.kind == FILE:
        return name.endswith(SUFFIXES) or (as_text and _is_text(entry.path))
    if name.endswith(SUFFIXES) or is_named:
        cause = f"{entry.path} is a {entry.kind}: inputs are read in blocks, from many processes, so they must be files"
        raise ArgosyError("data.bad-input", cause, fix="write its content to a file, and name that one")
    return False


def _once(name: str, entries: list[Entry], tell: Callable[[str], None]) -> list[Entry]:
    """Take each file once, although links may lead to it. Its own path is preferred, and one with a known suffix."""

    def rank(entry: Entry) -> tuple[bool, bool, bool, Path]:
        is_hidden = any(part.startswith(".") and part != ".." for part in entry.path.parts)
        return not entry.path.name.endswith(SUFFIXES), is_hidden, entry.is_link, entry.path

    taken: dict[str, Entry] = {}
    for entry in sorted(entries, key=rank):
        taken.setdefault(entry.real, entry)
    if again := sorted({each.path for each in entries} - {each.path for each in taken.values()}):
        what = f"links to files that are taken already are skipped: {len(again)}, such as {again[0]}"
        tell(f"{name}: {what}")
    return list(taken.values())


def _tell_links(name: str, tree: Tree, tell: Callable[[str], None]) -> None:
    """Tell about linked directories that are not followed."""
    if tree.repeated:
        first = sorted(tree.repeated)[0]
        number = len(tree.repeated)
        tell(f"{name}: links to directories that are read already are skipped: {number}, such as {first}")
    if tree.upward:
        first = sorted(tree.upward)[0]
        tell(f"{name}: links to directories above are not followed: {len(tree.upward)}, such as {first}")


def _tell_directories(name: str, matches: list[Entry], tell: Callable[[str], None]) -> None:
    """Tell about directories that match a pattern, and of which no file does."""
    above = {parent for match in matches if match.kind != DIRECTORY for parent in match.path.parents}
    empty = [match.path for match in matches if match.kind == DIRECTORY and match.path not in above]
    if empty:
        tell(
            f"{name}: directories match, whose files do not: {len(empty)}, such as {empty[0]}; name them to read their files"
        )


def _require_once(by_name: Sequence[tuple[str, list[InputFile]]]) -> None:
    """Refuse a file that two names stand for, also through a link or by another spelling of its path."""
    seen: dict[str, str] = {}
    directories: dict[str, str] = {}
    for name, files in by_name:
        for file in files:
            shown = file.path if file.path == name else f"{file.path} (from {name})"
            identity = _identity(file, directories)
            if identity in seen:
                raise ArgosyError(
                    "data.bad-input",
                    f"{seen[identity]} and {shown} are the same file: its documents would be taken twice",
                    fix="name it once, directly or by its directory; to repeat data, give it a higher weight in data.train",
                )
            seen[identity] = shown


def _identity(file: InputFile, directories: dict[str, str]) -> str:
    """Return a name that is the same for all spellings of a file. `directories` keeps the real paths of directories."""
    if "://" in file.path:
        # An address on the Hub has the commit, which revisions may share. Other addresses may be temporary copies.
        scheme, _, rest = (file.location if file.is_remote else file.path).partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme.lower()}://{host.lower()}{slash}{path}"
    if os.path.islink(file.path):
        return os.path.realpath(file.path)
    directory, name = os.path.split(file.path)
    if directory not in directories:
        directories[directory] = os.path.realpath(directory)
    return os.path.join(directories[directory], name)


def _remote(name: str, report: Report, as_text: bool) -> list[InputFile]:
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

"""List local directories and patterns, with what lies behind links.

Nothing is left out in silence: a directory that cannot be read is refused, and so is a link to nowhere where it may stand for data. Only inside
`**` such a link is passed over, since no other pattern would avoid it. Linked directories are followed. Each directory is listed once, which
also ends loops of links.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from argosy.errors import ArgosyError
from argosy.files import may_pass

FILE, DIRECTORY, DANGLING = "file", "directory", "dangling link"
_SPECIAL = ((stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket"), (stat.S_ISBLK, "device"), (stat.S_ISCHR, "device"))
_WILDCARDS = frozenset("*?[")


@dataclass(frozen=True)
class Entry:
    """An entry of a directory.

    Args:
        path: Its path, beginning with the name that the user gave.
        real: Its path without links.
        kind: FILE, DIRECTORY, DANGLING, or the kind of a special file, such as "FIFO".
        is_link: True if the entry itself is a link. `kind` is that of its target.
    """

    path: Path
    real: str
    kind: str
    is_link: bool


@dataclass
class Tree:
    """What lies below a directory."""

    directories: list[Entry] = field(default_factory=list)
    # Files, special files and links to nowhere.
    others: list[Entry] = field(default_factory=list)
    # Links to directories that are listed by another path.
    repeated: list[Path] = field(default_factory=list)
    # Links to a directory above the tree, which are not followed.
    upward: list[Path] = field(default_factory=list)


def entry_at(path: Path) -> Entry | None:
    """Return the entry at a path, or None if there is none."""
    try:
        is_link = stat.S_ISLNK(os.lstat(path).st_mode)
        if is_link:
            return _linked(path)
        return Entry(path, os.path.realpath(path), _kind(os.stat(path).st_mode), False)
    # A name with a NUL byte is a ValueError.
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise unreadable(path, error) from None


def walk(root: Entry, is_pruned: Callable[[set[str]], bool] = lambda names: False) -> Tree:
    """List everything below a directory.

    Args:
        root: The directory.
        is_pruned: A function of the names in a directory that is True if the directory is left out as a whole.
    """
    tree, listed = Tree(), {root.real}
    own, linked = [root], list[Entry]()
    while own or linked:
        # Own directories come first, so that a file keeps its own path where a link leads to it as well.
        directory = own.pop() if own else linked.pop(0)
        if directory.is_link and directory is not root:
            if directory.real in listed:
                tree.repeated.append(directory.path)
                continue
            if _contains(directory.real, directory.path):
                tree.upward.append(directory.path)
                continue
            listed.add(directory.real)
        found = _entries(directory)
        if is_pruned({entry.path.name for entry in found}):
            continue
        tree.directories.append(directory)
        tree.others.extend(entry for entry in found if entry.kind != DIRECTORY)
        below = [entry for entry in found if entry.kind == DIRECTORY]
        linked.extend(entry for entry in below if entry.is_link)
        new = [entry for entry in below if not entry.is_link and entry.real not in listed]
        listed.update(entry.real for entry in new)
        own.extend(new)
    return tree


def matching(pattern: str) -> list[Entry]:
    """List the entries that match a pattern, sorted by path. `**` stands for any number of directories."""
    path = Path(pattern)
    base = Path(path.anchor)
    start = Entry(base, os.path.realpath(base), DIRECTORY, False)
    found = {entry.path: entry for entry in _expand(start, path.relative_to(base).parts)}
    return [found[path] for path in sorted(found)]


def has_wildcard(name: str) -> bool:
    """Return whether a name contains a character of patterns."""
    return not _WILDCARDS.isdisjoint(name)


def unreadable(path: Path, error: OSError) -> ArgosyError:
    """Return the error that refuses a path that cannot be read: `data.interrupted` if the failure may pass."""
    cause = f"{path} cannot be read: {error.strerror or error}"
    if may_pass(error):
        return ArgosyError("data.interrupted", cause, fix="run the same command again; see the kernel log (dmesg)")
    fix = f"allow this user to read it (ls -ld {path}), or name the inputs so that it is not among them"
    return ArgosyError("data.bad-input", cause, fix=fix)


def dangling(path: Path) -> ArgosyError:
    """Return the error that refuses a link to nowhere."""
    return ArgosyError(
        "data.bad-input",
        f"{path} is a link to {os.readlink(path)}, which leads to no file",
        fix="restore the target, remove the link, or name the inputs by a pattern that does not match the link",
    )


def _expand(base: Entry, parts: Sequence[str]) -> Iterator[Entry]:
    if not parts:
        yield base
        return
    part, rest = parts[0], parts[1:]
    if part == "**":
        for directory in walk(base).directories:
            yield from _expand(directory, rest)
        return
    if has_wildcard(part):
        found = [entry for entry in _entries(base) if fnmatchcase(entry.path.name, part)]
    else:
        at = entry_at(base.path / part)
        found = [] if at is None else [at]
    for entry in found:
        # A link to nowhere may have been a directory.
        if not rest or entry.kind == DANGLING:
            yield entry
        elif entry.kind == DIRECTORY:
            yield from _expand(entry, rest)


def _entries(directory: Entry) -> list[Entry]:
    """Return the entries of a directory, sorted by name."""
    try:
        with os.scandir(directory.path) as scanned:
            found = sorted(scanned, key=lambda entry: entry.name)
    except PermissionError as error:
        # The file system's own directory, which only root may read.
        if directory.path.name == "lost+found":
            return []
        raise unreadable(directory.path, error) from None
    except OSError as error:
        raise unreadable(directory.path, error) from None
    entries = (_entry(directory, entry) for entry in found)
    return [entry for entry in entries if entry is not None]


def _entry(directory: Entry, scanned: os.DirEntry[str]) -> Entry | None:
    """Return an entry, or None if it was removed just now."""
    path = directory.path / scanned.name
    try:
        if scanned.is_symlink():
            return _linked(path)
        real = os.path.join(directory.real, scanned.name)
        # The directory knows these kinds. Only the others cost a look at the file.
        if scanned.is_file(follow_symlinks=False):
            return Entry(path, real, FILE, False)
        if scanned.is_dir(follow_symlinks=False):
            return Entry(path, real, DIRECTORY, False)
        return Entry(path, real, _kind(os.lstat(path).st_mode), False)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from None


def _linked(path: Path) -> Entry:
    try:
        kind = _kind(os.stat(path).st_mode)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        # Raises FileNotFoundError if the link itself was removed just now.
        os.lstat(path)
        kind = DANGLING
    return Entry(path, os.path.realpath(path), kind, True)


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return FILE
    if stat.S_ISDIR(mode):
        return DIRECTORY
    return next((kind for matches, kind in _SPECIAL if matches(mode)), "special file")


def _contains(directory: str, link: Path) -> bool:
    """Return whether a directory holds a link, at any depth."""
    return Path(os.path.realpath(link.parent)).is_relative_to(directory)

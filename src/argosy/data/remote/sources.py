"""Resolve the data set names of `argosy data fetch` to files.

A name is one of: a short name of a common data set, any Hugging Face data set as `owner/name` with config and split, a folder,
file or pattern as `hf://datasets/owner/name[@revision]/path`, or a plain http(s) URL. Configs and splits come from the data
set card. Without one they come from the names of folders and files, as in the Hub's own viewer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from argosy.data.remote.download import explain
from argosy.data.remote.hub import DataSet, Entry, Hub, RemoteFile, safe_path
from argosy.data.remote.known_sets import KNOWN, KNOWN_FILES, KnownSet, known_set
from argosy.data.remote.web import BadStatus, Web, check_url, refuse, shown
from argosy.data.text.inputs import SUFFIXES
from argosy.errors import ArgosyError

DEFAULT_CONFIG = "default"
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_ONE_WORD = {word: split for split, words in _SPLIT_WORDS.items() for word in words}
# The limit of wildcards in one pattern: with more, matching could take exponential time.
_WILDCARDS = 8


@dataclass(frozen=True)
class Choice:
    """The part of a data set to fetch."""

    config: str | None = None
    # One split, or several separated by commas. None: train.
    split: str | None = None
    revision: str | None = None
    # The number of files of each split. None: all.
    sample: int | None = None


def find_files(names: Sequence[str], choice: Choice, web: Web, report: Callable[[str], None]) -> list[RemoteFile]:
    """List the files of all named data sets in a fixed order. Refuse two files that would be written to the same path."""
    files: dict[str, RemoteFile] = {}
    for name in names:
        for file in _find(name, choice, web, report):
            other = files.setdefault(file.path, file)
            if other.url != file.url:
                refuse(
                    f"{file.origin} and {other.origin} both hold {file.path}", "fetch them to two --output directories"
                )
    return list(files.values())


def text_key(names: Sequence[str]) -> str:
    """Return the JSON key under which these data sets store their text."""
    keys = {known.text_key if (known := known_set(name)) else "text" for name in names}
    if len(keys) > 1:
        refuse(
            f"the data sets keep their text under different keys: {', '.join(sorted(keys))}", "fetch them one by one"
        )
    return keys.pop()


def split_of(path: str) -> str | None:
    """Return the split in the name of a folder or file, or None. Outer folders take precedence."""
    for part in PurePosixPath(path.lower()).parts:
        for split, words in _SPLIT_WORDS.items():
            if re.search(rf"(?<![a-z])({'|'.join(words)})(?![a-z])", part):
                return split
    return None


def _find(name: str, choice: Choice, web: Web, report: Callable[[str], None]) -> list[RemoteFile]:
    if file := KNOWN_FILES.get(name.lower()):
        return [_by_url(f"{web.hub}/{file}", choice, web)]
    name = _hub_page_as_name(name, web.hub)
    if name.startswith("hf://"):
        return _by_path(name, choice, Hub(web))
    if "://" in name:
        return [_by_url(name, choice, web)]
    known = known_set(name)
    repo = known.repo if known else name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repo, re.ASCII) or ".." in repo:
        refuse(
            f"{name!r} is not a data set's name{_did_you_mean(name, [*KNOWN, *KNOWN_FILES])}",
            f"write {', '.join([*KNOWN, *KNOWN_FILES])}, owner/name, hf://datasets/owner/name/path, or an https URL",
        )
    hub = Hub(web)
    data_set = hub.find(repo, choice.revision or "main")
    layout = _Layout(hub, data_set, known or KnownSet(repo), choice.config)
    found = [e for split in (choice.split or "train").split(",") for e in layout.files(split, choice.sample, report)]
    return [hub.remote_file(data_set, entry) for entry in found]


class _Layout:
    """The file layout of one config of a data set. Only the necessary folders are listed: C4 has 100,000 other files."""

    def __init__(self, hub: Hub, data_set: DataSet, known: KnownSet, config: str | None) -> None:
        self.hub, self.data_set, self.known = hub, data_set, known
        wanted = config or known.config
        if data_set.configs:
            self.config = self._choose(wanted, list(data_set.configs), data_set.default_config)
            return
        self.root = [entry for entry in hub.tree(data_set) if not entry.path.startswith(".")]
        folders = [entry.path for entry in self.root if entry.is_folder]
        # Folders that belong to the default config.
        self.shared = [f for f in folders if split_of(f) or f == "data"]
        own = [f for f in folders if f not in self.shared]
        has_default = bool(self.shared) or any(_is_data(entry) for entry in self.root)
        if wanted and known.folder.format(config=wanted) in own:
            wanted = known.folder.format(config=wanted)
        self.config = self._choose(
            wanted, [DEFAULT_CONFIG] * has_default + own, DEFAULT_CONFIG if has_default else None
        )

    def files(self, split: str, sample: int | None, report: Callable[[str], None]) -> list[Entry]:
        """Return the files of a split, or the first `sample` of them."""
        small = self.known.small.get(split)
        if small:
            report(f"{split} is {small.about}")
        asked = small.split if small else split
        found = self._by_card(asked) if self.data_set.configs else self._by_folders(asked)
        return found[: small.files if small else None][:sample]

    def _choose(self, wanted: str | None, present: list[str], default: str | None) -> str:
        if wanted in present:
            return str(wanted)
        if wanted is None and (default or len(present) == 1):
            return default or present[0]
        cause = f"{self.data_set.repo} has no config {wanted!r}" if wanted else f"{self.data_set.repo} has many configs"
        self._refuse(cause + _did_you_mean(wanted, present), "--config", wanted, present)

    def _by_card(self, split: str) -> list[Entry]:
        splits = self.data_set.configs[self.config]
        name = split if split in splits else next((s for s in splits if _same_split(s, split)), None)
        if name is None:
            self._no_split(split, splits)
        found: dict[str, Entry] = {}
        for pattern in splits[name]:
            found |= {entry.path: entry for entry in _matching(self.hub, self.data_set, pattern)}
        if not found:
            refuse(
                f"the card of {self.data_set.repo} names files that are not there: {', '.join(splits[name])}",
                "name the files with hf://datasets/…",
            )
        return sorted(found.values(), key=lambda entry: entry.path)

    def _by_folders(self, split: str) -> list[Entry]:
        if self.config == DEFAULT_CONFIG:
            mine = [f for f in self.shared if _same_split(split_of(f) or "", split)]
            folders, prefix = mine or [f for f in self.shared if f == "data"], ""
            listed = [entry for entry in self.root if not entry.is_folder]
        else:
            folders, prefix, listed = [self.config], f"{self.config}/", []
        for folder in folders:
            listed += self.hub.tree(self.data_set, folder, recursive=True)
        data = [entry for entry in listed if _is_data(entry)]
        found = [entry for entry in data if _same_split(split_of(entry.path.removeprefix(prefix)) or "train", split)]
        if not found:
            others = {split_of(entry.path.removeprefix(prefix)) or "train" for entry in data}
            if self.config == DEFAULT_CONFIG:
                others |= {named for folder in self.shared if (named := split_of(folder))}
            self._no_split(split, others)
        return sorted(found, key=lambda entry: entry.path)

    def _no_split(self, split: str, present: Iterable[str]) -> NoReturn:
        names = sorted({*present, *self.known.small})
        self._refuse(
            f"{self.data_set.repo}, config {self.config}, has no split {split!r}{_did_you_mean(split, names)}",
            "--split",
            split,
            names,
        )

    def _refuse(self, cause: str, key: str, value: str | None, present: list[str]) -> NoReturn:
        some = ", ".join(present[:40]) + (f" and {len(present) - 40} more" if len(present) > 40 else "")
        raise ArgosyError("data.fetch-refused", cause, key=key, value=value, fix=f"there are: {some or 'none'}")


def _by_path(name: str, choice: Choice, hub: Hub) -> list[RemoteFile]:
    parts = re.fullmatch(r"hf://datasets/([\w-][\w.-]*/[\w-][\w.-]*)(?:@([^/]+))?(?:/(.*))?", name, re.ASCII)
    if parts is None:
        refuse(
            f"{name} is not a data set of the Hub", "write hf://datasets/owner/name[@revision]/folder, file or pattern"
        )
    if choice.config or choice.split or (parts[2] and choice.revision):
        refuse(f"{name} already says which files", "leave out --config, --split, and the second revision")
    data_set = hub.find(parts[1], unquote(parts[2] or "") or choice.revision or "main")
    found = _matching(hub, data_set, (parts[3] or "").strip("/"))
    if not found:
        refuse(f"{name} matches no file", f"see {hub.web.hub}/datasets/{parts[1]}/tree/main")
    return [hub.remote_file(data_set, entry) for entry in found[: choice.sample]]


def _matching(hub: Hub, data_set: DataSet, pattern: str) -> list[Entry]:
    """Return the files that match a pattern. Without a wildcard, return the file itself or the data files of the folder."""
    fixed, star, _ = pattern.partition("*")
    if star or "?" in fixed:
        folder = fixed.partition("?")[0].rpartition("/")[0]
        matches = re.compile(_as_regex(pattern)).fullmatch
        deep = "/" in pattern[len(folder) :].lstrip("/") or "**" in pattern
        below = hub.tree(data_set, safe_path(folder) if folder else "", recursive=deep)
        return [entry for entry in below if not entry.is_folder and matches(entry.path)]
    folder = safe_path(pattern).rpartition("/")[0] if pattern else ""
    beside = hub.tree(data_set, folder) if pattern else []
    for entry in beside:
        if entry.path == pattern and not entry.is_folder:
            return [entry]
    if pattern and not any(entry.path == pattern for entry in beside):
        return []
    return [entry for entry in hub.tree(data_set, pattern, recursive=True) if _is_data(entry)]


def _as_regex(pattern: str) -> str:
    """Convert a glob pattern to a regular expression. `*` and `?` do not match a slash, `**` does."""
    pieces = re.findall(r"\*\*/?|[*?]|[^*?]+", pattern)
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    if sum(piece in meanings for piece in pieces) > _WILDCARDS:
        refuse(f"the pattern {pattern[:200]} has more than {_WILDCARDS} wildcards", "write a simpler one")
    return "".join(meanings.get(piece) or re.escape(piece) for piece in pieces)


def _by_url(name: str, choice: Choice, web: Web) -> RemoteFile:
    """Resolve a plain URL, with an optional `#sha256=…`. A request for one byte gives the size and the validator."""
    if name.partition("://")[0] not in ("http", "https"):
        refuse(
            f"{name.partition('?')[0]} cannot be fetched",
            "fetch takes https, http and hf; `argosy data prepare` reads s3, gs and az itself",
        )
    check_url(name, "URL")
    if choice.config or choice.split or choice.revision:
        refuse(f"{shown(name)} is a file", "leave out --config, --split and --revision")
    url, _, fragment = name.partition("#")
    sha256 = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", fragment)
    if fragment and sha256 is None:
        refuse(
            f"#{fragment[:80]} after the URL is not understood", "write #sha256= and 64 hexadecimal digits, or nothing"
        )
    path = safe_path(PurePosixPath(unquote(urlsplit(url).path)).name or "index")
    try:
        with web.retry(shown(url), lambda: web.open(url, {"Range": "bytes=0-0"})) as response:
            ranged = re.fullmatch(r"bytes 0-0/(\d+)", response.headers.get("Content-Range", ""))
            size = ranged[1] if ranged else response.headers.get("Content-Length", "")
            etag = response.headers.get("ETag", "")
            validator = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
    except BadStatus as error:
        if error.status == 416 and error.headers.get("Content-Range") == "bytes */0":
            size, validator = "0", None
        else:
            raise explain(error) from None
    if not size.isdecimal():
        refuse(f"{shown(url)}: the server does not say how large it is", "fetch it by other means")
    return RemoteFile(url, shown(url), path, int(size), sha256[1].lower() if sha256 else None, validator=validator)


def _hub_page_as_name(name: str, hub: str) -> str:
    """Convert a Hub page URL, as copied from a browser, to the name of the data set or file that it shows."""
    page = re.fullmatch(
        re.escape(hub)
        + r"/datasets/([\w-][\w.-]*/[\w-][\w.-]*)(?:/(?:resolve|blob|tree)/([^/?]+)(?:/([^?]*))?)?/?(?:\?.*)?",
        name,
    )
    if page is None:
        return name
    return page[1] if page[2] is None else f"hf://datasets/{page[1]}@{page[2]}/{unquote(page[3] or '')}"


def _is_data(entry: Entry) -> bool:
    return not entry.is_folder and entry.path.endswith(SUFFIXES)


def _same_split(one: str, other: str) -> bool:
    """Return True if two names mean the same split, such as `val` and `validation`."""
    return _ONE_WORD.get(one, one) == _ONE_WORD.get(other, other)


def _did_you_mean(wanted: str | None, present: Iterable[str]) -> str:
    close = difflib.get_close_matches(wanted or "", list(present), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""

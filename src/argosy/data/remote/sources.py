"""What `argosy data fetch` can be asked for, and the files that stands for.

A short name of the data sets our users train on, any Hugging Face data set as `owner/name` with config and split, a
folder, file or pattern of one as `hf://datasets/owner/name[@revision]/path`, or a plain http(s) URL. Configs and splits
are taken from the data set's card; where it has none, from the names of folders and files, as the Hub's own viewer does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from argosy.data.remote.download import explain
from argosy.data.remote.hub import DataSet, Entry, Hub, RemoteFile, safe_path
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
_WILDCARDS = 8  # in one pattern; more could keep the matcher busy for ever


@dataclass(frozen=True)
class FirstFiles:
    """A split that is the first files of another."""

    split: str
    files: int
    about: str


@dataclass(frozen=True)
class KnownSet:
    repo: str
    config: str | None = None
    folder: str = "{config}"  # how a config's folder is named
    text_key: str = "text"
    small: dict[str, FirstFiles] = field(default_factory=dict)


KNOWN = {
    "slimpajama": KnownSet("cerebras/SlimPajama-627B"),  # 59,166 .jsonl.zst files of train, 895 GB
    "c4": KnownSet(
        "allenai/c4",
        config="en",
        small={
            "train_small": FirstFiles(
                "train", 1, "the first of 1,024 files, about 356,000 documents; llm-foundry takes the first 100,000"
            ),
            "val_small": FirstFiles(
                "validation", 1, "the first of 8 files, about 45,600 documents; llm-foundry takes the first 10,000"
            ),
        },
    ),
    "oscar": KnownSet("oscar-corpus/OSCAR-2301", folder="{config}_meta", text_key="content"),  # a config a language
}
_BY_REPO = {known.repo.lower(): known for known in KNOWN.values()}


@dataclass(frozen=True)
class Choice:
    """Which part of a data set."""

    config: str | None = None
    split: str | None = None  # one, or several with commas; train if not said
    revision: str | None = None
    sample: int | None = None  # this many files of each split


def find_files(names: Sequence[str], choice: Choice, web: Web, report: Callable[[str], None]) -> list[RemoteFile]:
    """All files meant, in a fixed order. Two under one name would overwrite each other, and are refused."""
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
    """The JSON key under which these data sets keep their text."""
    keys = {known.text_key if (known := _known(name)) else "text" for name in names}
    if len(keys) > 1:
        refuse(
            f"the data sets keep their text under different keys: {', '.join(sorted(keys))}", "fetch them one by one"
        )
    return keys.pop()


def split_of(path: str) -> str | None:
    """The split that a folder or file is named after; outer folders count first."""
    for part in PurePosixPath(path.lower()).parts:
        for split, words in _SPLIT_WORDS.items():
            if re.search(rf"(?<![a-z])({'|'.join(words)})(?![a-z])", part):
                return split
    return None


def _known(name: str) -> KnownSet | None:
    on_hub = re.match(r"hf://datasets/([^/@]+/[^/@]+)", name)
    return KNOWN.get(name.lower()) or _BY_REPO.get((on_hub[1] if on_hub else name).lower())


def _find(name: str, choice: Choice, web: Web, report: Callable[[str], None]) -> list[RemoteFile]:
    name = _hub_page_as_name(name, web.hub)
    if name.startswith("hf://"):
        return _by_path(name, choice, Hub(web))
    if "://" in name:
        return [_by_url(name, choice, web)]
    known = _known(name)
    repo = known.repo if known else name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repo, re.ASCII) or ".." in repo:
        refuse(
            f"{name!r} is not a data set's name{_did_you_mean(name, KNOWN)}",
            f"write {', '.join(KNOWN)}, owner/name, hf://datasets/owner/name/path, or an https URL",
        )
    hub = Hub(web)
    data_set = hub.find(repo, choice.revision or "main")
    layout = _Layout(hub, data_set, known or KnownSet(repo), choice.config)
    found = [e for split in (choice.split or "train").split(",") for e in layout.files(split, choice.sample, report)]
    return [hub.remote_file(data_set, entry) for entry in found]


class _Layout:
    """Where a data set keeps the files of a config. Only the folders needed are listed: C4 has 100,000 other files."""

    def __init__(self, hub: Hub, data_set: DataSet, known: KnownSet, config: str | None) -> None:
        self.hub, self.data_set, self.known = hub, data_set, known
        wanted = config or known.config
        if data_set.configs:
            self.config = self._choose(wanted, list(data_set.configs), data_set.default_config)
            return
        self.root = [entry for entry in hub.tree(data_set) if not entry.path.startswith(".")]
        folders = [entry.path for entry in self.root if entry.is_folder]
        self.shared = [f for f in folders if split_of(f) or f == "data"]  # hold no config but the default one
        own = [f for f in folders if f not in self.shared]
        has_default = bool(self.shared) or any(_is_data(entry) for entry in self.root)
        if wanted and known.folder.format(config=wanted) in own:
            wanted = known.folder.format(config=wanted)
        self.config = self._choose(
            wanted, [DEFAULT_CONFIG] * has_default + own, DEFAULT_CONFIG if has_default else None
        )

    def files(self, split: str, sample: int | None, report: Callable[[str], None]) -> list[Entry]:
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
        refuse(f"{name} is or holds no file", f"see {hub.web.hub}/datasets/{parts[1]}/tree/main")
    return [hub.remote_file(data_set, entry) for entry in found[: choice.sample]]


def _matching(hub: Hub, data_set: DataSet, pattern: str) -> list[Entry]:
    """The files of a pattern, or, where it has no wildcard, the file itself or the data files of the folder."""
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
    """`*` and `?` stay within a folder, `**` does not."""
    pieces = re.findall(r"\*\*/?|[*?]|[^*?]+", pattern)
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    if sum(piece in meanings for piece in pieces) > _WILDCARDS:
        refuse(f"the pattern {pattern[:200]} has more than {_WILDCARDS} wildcards", "write a simpler one")
    return "".join(meanings.get(piece) or re.escape(piece) for piece in pieces)


def _by_url(name: str, choice: Choice, web: Web) -> RemoteFile:
    """A plain URL; `#sha256=…` at its end is checked. The server is asked for one byte, which tells size and validator."""
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
        with web.patiently(shown(url), lambda: web.open(url, {"Range": "bytes=0-0"})) as response:
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
    """A page of the Hub, as copied from a browser, is the data set or file it shows."""
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
    """`val` and `validation` are."""
    return _ONE_WORD.get(one, one) == _ONE_WORD.get(other, other)


def _did_you_mean(wanted: str | None, present: Iterable[str]) -> str:
    close = difflib.get_close_matches(wanted or "", list(present), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""

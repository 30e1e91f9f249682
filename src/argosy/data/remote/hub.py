"""A small client of the Hugging Face Hub for `argosy data fetch`: the commit, card configs and hashed files of a repository.

It makes three REST calls (`/api/datasets/…/revision/…`, `/api/datasets/…/tree/…`, `/datasets/…/resolve/…`, and the same for models) through the HTTP
client that downloads, instead of a second client with its own retries, cache and token. HF_ENDPOINT selects a mirror. File
names from the Hub are untrusted: those that could leave the output directory are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal
from urllib.parse import quote, urlencode, urljoin

import orjson

from argosy.data.remote.web import BadStatus, Web, origin, refuse
from argosy.errors import ArgosyError
from argosy.retry import Transient

# The size limit of one response.
_PAGE_BYTES = 64 << 20
_PAGES = 10_000


@dataclass(frozen=True)
class RemoteFile:
    """A file to download, with everything that is known in advance."""

    url: str
    # The data set or URL it belongs to, without secrets.
    origin: str
    # The path below the output directory.
    path: str
    size: int
    sha256: str | None = None
    # The hash of a small Hub file that is stored in git itself.
    git_sha1: str | None = None
    # ETag or Last-Modified of a plain URL, for If-Range.
    validator: str | None = None
    on_hub: bool = False

    @property
    def identity(self) -> str:
        """A string that changes when the file does, as far as its server reports."""
        return self.sha256 or self.git_sha1 or self.validator or f"{self.size} bytes"

    @property
    def has_hash(self) -> bool:
        return bool(self.sha256 or self.git_sha1)


@dataclass(frozen=True)
class Entry:
    """A file or folder in a Hub repository."""

    path: str
    is_folder: bool
    size: int = 0
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set at one commit."""

    repo: str
    commit: str
    # config -> split -> patterns, if its card lists them.
    configs: dict[str, dict[str, list[str]]]
    default_config: str | None

    @property
    def name(self) -> str:
        return f"hf://datasets/{self.repo}"


class Hub:
    """The Hub client, for repositories of one kind. Addresses of models have no word for their kind, those of data sets do."""

    def __init__(self, web: Web, kind: Literal["datasets", "models"] = "datasets") -> None:
        self.web = web
        self._api, self._pages = f"/api/{kind}", "" if kind == "models" else f"/{kind}"
        self._noun = {"datasets": "data set", "models": "model"}[kind]

    def find(self, repo: str, revision: str) -> DataSet:
        """Resolve a revision of a data set to a commit. Refuse a gated data set if there is no token."""
        query = urlencode([("expand", "sha"), ("expand", "cardData"), ("expand", "gated")])
        facts, _ = self._json(f"{self._api}/{repo}/revision/{quote(revision, safe='')}?{query}", repo, revision)
        commit = facts.get("sha") if isinstance(facts, dict) else None
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            raise _nonsense(f"{repo} has no commit")
        if facts.get("gated") and not self.web.has_token:
            raise self._gated(repo)
        configs, default = _card_configs(facts.get("cardData"))
        return DataSet(repo, commit, configs, default)

    def tree(self, data_set: DataSet, folder: str = "", *, recursive: bool = False) -> list[Entry]:
        """List a folder, sorted by name."""
        below = f"/{quote(folder)}" if folder else ""
        page: str | None = f"{self._api}/{data_set.repo}/tree/{data_set.commit}{below}?recursive={recursive}"
        entries: list[Entry] = []
        for _ in range(_PAGES):
            if page is None:
                return sorted(entries, key=lambda entry: entry.path)
            listed, page = self._json(page, data_set.repo, data_set.commit)
            entries.extend(_entries(listed))
        raise _nonsense(f"the listing of {data_set.repo} does not end")

    def remote_file(self, data_set: DataSet, entry: Entry) -> RemoteFile:
        """Return the download of a listed file."""
        return RemoteFile(
            url=f"{self.web.hub}{self._pages}/{data_set.repo}/resolve/{data_set.commit}/{quote(entry.path)}",
            origin=data_set.name,
            path=safe_path(entry.path),
            size=entry.size,
            sha256=entry.sha256,
            git_sha1=entry.git_sha1,
            on_hub=True,
        )

    def explain(self, error: BadStatus, repo: str, revision: str = "") -> ArgosyError:
        """Return the error for a 4xx of the Hub, with its meaning and a fix."""
        page = f"{self.web.hub}{self._pages}/{repo}"
        if error.hub_code == "GatedRepo" or error.status == 403:
            return self._gated(repo)
        if error.hub_code == "RevisionNotFound":
            cause, fix = f"{repo} has no revision {revision!r}", f"see {page}/tree/main for its branches and tags"
        elif error.hub_code == "EntryNotFound":
            cause, fix = f"{repo} has no such file or folder: {error}", f"see {page}/tree/main"
        # The Hub answers alike for a private and for a missing data set.
        elif error.status in (401, 404):
            cause = f"there is no {self._noun} {repo}, or it is private" + (
                " and HF_TOKEN has no access" if self.web.has_token else ""
            )
            fix = f"check the name at {page}; for a private one set HF_TOKEN in the environment"
        else:
            cause, fix = str(error), f"see {page}"
        return ArgosyError("data.fetch-refused", cause, fix=fix)

    def _gated(self, repo: str) -> ArgosyError:
        why = "HF_TOKEN has no access to it" if self.web.has_token else "HF_TOKEN is not set"
        return ArgosyError(
            "data.fetch-refused",
            f"{repo} is gated: its owner wants terms accepted first, and {why}",
            fix=f"accept the terms at {self.web.hub}{self._pages}/{repo}, then set HF_TOKEN in the environment to a token that may read it",
        )

    def _json(self, address: str, repo: str, revision: str) -> tuple[Any, str | None]:
        """Return the JSON response and the URL of the next page. Refuse a page on another host, because the token is sent there."""
        url = urljoin(f"{self.web.hub}/", address) if "://" in address else self.web.hub + address

        def attempt() -> tuple[Any, str | None]:
            with self.web.open(url) as response:
                content = self.web.read(response, _PAGE_BYTES + 1, whole=True)
                following = re.search(r'<([^<>]+)>\s*;\s*rel="?next', response.headers.get("Link", ""))
            if len(content) > _PAGE_BYTES:
                raise _nonsense(f"an answer about {repo} has more than {_PAGE_BYTES >> 20} MiB")
            try:
                return orjson.loads(content), urljoin(url, following[1]) if following else None
            except orjson.JSONDecodeError:
                raise Transient("the Hub's answer was cut short or is not JSON") from None

        try:
            answer, following = self.web.retry(f"listing {repo}", attempt)
        except BadStatus as error:
            raise self.explain(error, repo, revision) from None
        if following is not None and origin(following) != origin(self.web.hub):
            raise _nonsense(f"the listing of {repo} continues on another host")
        return answer, following


def safe_path(name: str) -> str:
    """Return a listed file name. Refuse one that could leave the output directory, is hidden or is not printable."""
    path = PurePosixPath(name)
    plain = name == str(path) and not path.is_absolute() and name.isprintable() and "\\" not in name
    if not plain or any(part.startswith((".", "~")) or len(part.encode()) > 200 for part in path.parts) or not name:
        refuse(f"the server lists a file under the unsafe name {name[:200]!r}", "do not fetch from there")
    return name


def _nonsense(cause: str) -> ArgosyError:
    return ArgosyError("data.fetch-failed", cause, fix="check HF_ENDPOINT: is it a Hugging Face Hub?")


def _entries(listed: Any) -> Iterator[Entry]:
    if not isinstance(listed, list):
        raise _nonsense("the Hub's listing is not a list")
    for item in listed:
        try:
            lfs = item.get("lfs")
            yield Entry(
                path=str(item["path"]),
                is_folder=item["type"] == "directory",
                size=max(0, int(lfs["size"] if lfs else item.get("size") or 0)),
                sha256=str(lfs["oid"]).lower() if lfs else None,
                git_sha1=None if lfs else str(item.get("oid") or "") or None,
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise _nonsense("the Hub lists a file without name, kind or size") from None


def _card_configs(card: Any) -> tuple[dict[str, dict[str, list[str]]], str | None]:
    """Read the `configs` of a data set card. Malformed entries are skipped; folder names decide then."""
    configs: dict[str, dict[str, list[str]]] = {}
    default = None
    listed = card.get("configs") if isinstance(card, dict) else None
    for item in listed if isinstance(listed, list) else []:
        if not isinstance(item, dict) or not isinstance(item.get("config_name"), str) or "data_files" not in item:
            continue
        folder = f"{item['data_dir'].strip('/')}/" if isinstance(item.get("data_dir"), str) else ""
        files = item["data_files"]
        if not (isinstance(files, list) and files and isinstance(files[0], dict)):
            files = [{"split": "train", "path": files}]
        splits: dict[str, list[str]] = {}
        for part in files:
            if isinstance(part, dict) and isinstance(part.get("split"), str):
                paths = part.get("path") if isinstance(part.get("path"), list) else [part.get("path")]
                patterns = [folder + path for path in paths or [] if isinstance(path, str)]
                splits.setdefault(part["split"], []).extend(patterns)
        configs[item["config_name"]] = splits
        if item.get("default") is True or item["config_name"] == "default":
            default = item["config_name"]
    return configs, default

"""Remote inputs of `argosy data prepare`: list, fingerprint and read them by range.

`s3://`, `gs://`, `az://` and other fsspec schemes are read through `ObjectStore`; `https://`, `http://` and `hf://datasets/…`
through the HTTP client of `argosy data fetch`. Both retry transient errors. Other errors name the address.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from argosy.data.remote.objects import ObjectFacts, ObjectStore
from argosy.data.remote.web_inputs import find_on_hub, find_on_web, look_on_web, read_from_web
from argosy.data.text.input_files import input_changed, require_same
from argosy.data.text.inputs import InputFile
from argosy.errors import ArgosyError

Report = Callable[[str], None] | None
_WEB = ("http", "https")


def find_remote(name: str, report: Report) -> list[InputFile]:
    """List the files of a URL, a prefix or a pattern, sorted by name, each with its fingerprint."""
    scheme = name.partition("://")[0]
    if scheme == "hf":
        return find_on_hub(name)
    if scheme in _WEB:
        return find_on_web(name, _listed, report)
    return [InputFile(url, _size(url, facts), facts.version) for url, facts in _listed(name)]


def _size(url: str, facts: ObjectFacts) -> int:
    if facts.size is None:
        raise ArgosyError(
            "data.fetch-failed", f"the store does not say how large {url} is", fix="copy it to a local disk first"
        )
    return facts.size


def _listed(name: str) -> Iterator[tuple[str, ObjectFacts]]:
    """Yield the objects of a pattern, below a prefix, or the one of that name."""
    base, pattern = name.rstrip("/"), ""
    # Skip the host: an IPv6 address has brackets.
    if wildcard := re.compile(r"[*?\[]").search(name, name.find("/", name.find("://") + 3)):
        base = name[: wildcard.start()].rpartition("/")[0]
        pattern = name[len(base) + 1 :]
    store = ObjectStore(base)
    for below, facts in sorted(store.listing(pattern).items()):
        yield (f"{base}/{below}" if below else base), facts


def look_again(file: InputFile) -> InputFile:
    """Return `file` with the size and version that its server reports now."""
    if file.location.startswith(("http://", "https://")):
        return look_on_web(file)
    store, name = _store_of(file.location)
    try:
        facts = store.facts(name)
    except ArgosyError as error:
        if error.code == "data.not-found":
            raise input_changed(file, "it is no longer there") from None
        raise
    return replace(file, size=_size(file.location, facts), version=facts.version)


def _read(file: InputFile, start: int, count: int) -> bytes:
    if file.location.startswith(("http://", "https://")):
        return read_from_web(file, start, count)
    store, name = _store_of(file.location)

    def require_unchanged() -> None:
        require_same(file, look_again(file))

    try:
        return store.read(name, start, count, recheck=require_unchanged)
    except ArgosyError as error:
        if error.code in ("data.not-found", "data.corrupt"):
            require_unchanged()
        raise


def _store_of(url: str) -> tuple[ObjectStore, str]:
    directory, _, name = url.rpartition("/")
    return _store(directory), name


@lru_cache(maxsize=64)
def _store(directory: str) -> ObjectStore:
    return ObjectStore(directory)


class RemoteInput(io.RawIOBase):
    """A seekable file over a remote object, with the size it had when it was listed. Each read is one range request."""

    def __init__(self, file: InputFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, target: Any) -> int:
        count = min(len(target), self._file.size - self._at)
        if count <= 0:
            return 0
        content = _read(self._file, self._at, count)
        if len(content) != count:
            raise input_changed(self._file, f"received {len(content):,} bytes instead of {count:,}")
        target[:count] = content
        self._at += count
        return count

"""Inputs on web servers: `https://…/file.jsonl`, the index page of a directory, and files of data sets on the Hub.

The first request asks for one byte. If the response has that byte, the size, and an ETag or Last-Modified, the file is read by
range requests from any number of processes. If it does not (no ranges, no length, no validator, or a Content-Encoding), the
file is copied once to a temporary file, which all processes of this machine read.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from argosy.data.remote.sources import Choice, find_files
from argosy.data.remote.web import BadStatus, Web, check_url, origin, shown
from argosy.data.text.input_files import input_changed, require_same
from argosy.data.text.inputs import SUFFIXES, InputFile
from argosy.errors import ArgosyError
from argosy.retry import Transient

Report = Callable[[str], None] | None
Result = TypeVar("Result")
_VALIDATORS = ("ETag=", "Last-Modified=")
_DIGEST = 16  # bytes
_CHUNK = 1 << 20  # bytes
_PARALLEL_REQUESTS = 8
# Temporary files, deleted when the process ends.
_copies: list[Any] = []


@lru_cache(maxsize=1)
def web() -> Web:
    """Return the HTTP client of this process."""
    return Web()


def find_on_web(name: str, listed: Callable[[str], Iterable[tuple[str, object]]], report: Report) -> list[InputFile]:
    """List one file, or the files that the index page of a directory links to (`…/` or a pattern).

    Args:
        name: The URL.
        listed: A function that lists the objects of a directory or pattern.
        report: A function that receives a message for each file that has to be copied.
    """
    check_url(name, "input")
    if urlsplit(name).query or urlsplit(name).fragment:
        raise ArgosyError(
            "data.bad-input",
            f"{shown(name)}?… carries a query, which may hold a secret, and a corpus keeps the names of its inputs",
            fix="fetch it first: argosy data fetch URL --output raw, then prepare raw",
        )
    urls = [name]
    if name.endswith("/") or re.search(r"[*\[]", urlsplit(name).path):
        urls = [url for url, _ in listed(name) if url.endswith(SUFFIXES)]
    elif not name.endswith(SUFFIXES):
        return []
    with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        return list(pool.map(lambda url: _find(url, report), urls))


def find_on_hub(name: str) -> list[InputFile]:
    """List the files of `hf://datasets/owner/name[@revision]/path` at one commit, where they cannot change."""
    files = find_files([name], Choice(), web(), lambda text: None)
    return [
        InputFile(f"{file.origin}/{file.path}", file.size, f"hash={file.identity}", address=file.url)
        for file in sorted(files, key=lambda file: file.path)
    ]


def look_on_web(file: InputFile) -> InputFile:
    """Return `file` with the size and version that its server reports now. A file of a Hub commit is returned as it is."""
    if not file.version.startswith(_VALIDATORS):
        return file

    def look() -> InputFile:
        with _open(file.location, {"Range": "bytes=0-0"}) as response:
            facts = _Answer(response)
            return replace(file, size=facts.size if facts.size is not None else file.size, version=facts.version)

    return _of_listed(file, look)


def read_from_web(file: InputFile, start: int, count: int) -> bytes:
    """Read bytes `start` to `start + count`. Refuse another version of the file than the listed one."""

    def attempt() -> bytes:
        with _open(file.location, {"Range": f"bytes={start}-{start + count - 1}"}) as response:
            facts = _Answer(response)
            if file.version.startswith(_VALIDATORS):
                require_same(file, replace(file, size=facts.size or file.size, version=facts.version))
            if not facts.is_range or facts.first != start:
                raise Transient(f"HTTP {response.status} without the requested range")
            body = web().read(response, count + 1, whole=True)
        if len(body) != count:
            raise Transient(f"received {len(body):,} bytes instead of {count:,}")
        return body

    return _of_listed(file, attempt)


def _find(url: str, report: Report) -> InputFile:
    def attempt() -> InputFile:
        try:
            with _open(url, {"Range": "bytes=0-0"}) as response:
                facts = _Answer(response)
                if facts.is_range and facts.size is not None and facts.version and not facts.is_encoded(url):
                    return InputFile(url, facts.size, facts.version)
                if response.status == 200:
                    return _copied(url, response, facts, report)
            with _open(url) as response:
                return _copied(url, response, _Answer(response), report)
        except BadStatus as error:
            if error.status == 416 and error.headers.get("Content-Range") == "bytes */0":
                return InputFile(url, 0, "empty", address=_keep(url, iter(()))[0])
            raise

    try:
        return web().retry(shown(url), attempt)
    except BadStatus as error:
        raise _refusal(url, error) from None


def _open(url: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    """Send one request. Only the Hub may redirect to other hosts, as it does for every large file."""
    return web().open(url, headers, other_hosts=origin(url) == origin(web().hub))


def _of_listed(file: InputFile, attempt: Callable[[], Result]) -> Result:
    """Retry a request for a listed file. A 404, 410 or 416 means that the file has changed."""
    try:
        return web().retry(shown(file.location), attempt)
    except BadStatus as error:
        if error.status in (404, 410, 416):
            raise input_changed(file, f"the server answers HTTP {error.status}") from None
        raise _refusal(file.location, error) from None


def _refusal(url: str, error: BadStatus) -> ArgosyError:
    if error.status in (404, 410):
        return ArgosyError("data.not-found", f"there is no {shown(url)} (HTTP {error.status})", fix="check the address")
    fix = "check the address"
    if error.status in (401, 403):
        fix = "the server wants a login, and prepare has none: fetch the file by other means and prepare the copy"
    return ArgosyError("data.fetch-failed", f"{shown(url)} cannot be read: HTTP {error.status}", fix=fix)


class _Answer:
    """The size, version and encoding of a file, from the headers of a response."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        header = response.headers.get
        ranged = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", header("Content-Range", ""))
        self.is_range = response.status == 206 and ranged is not None
        self.first = int(ranged[1]) if ranged else 0
        length = header("Content-Length", "") if response.status == 200 else ""
        self.size = int(ranged[3]) if ranged else int(length) if length.isdecimal() else None
        self.is_delimited = self.size is not None or header("Transfer-Encoding", "").lower() == "chunked"
        self.encoding = header("Content-Encoding", "identity").lower().removeprefix("x-") or "identity"
        named = ((key, header(key)) for key in ("ETag", "Last-Modified"))
        self.version = next((f"{key}={value}" for key, value in named if value), "")

    def is_encoded(self, url: str) -> bool:
        """Return True if the body is an encoded form of the file.

        Some servers send a .gz file with Content-Encoding: gzip, or a .zst file with zstd. Such a body is the file itself.
        """
        own = {"gzip": (".gz",), "zstd": (".zst", ".zstd")}.get(self.encoding, ())
        return self.encoding != "identity" and not url.endswith(own)


def _copied(url: str, response: http.client.HTTPResponse, facts: _Answer, report: Report) -> InputFile:
    """Copy the body to a temporary file. A body of unknown length could be truncated, so it is read twice and compared."""
    path, size, digest = _keep(url, _body(url, response, facts))
    if not facts.is_delimited:
        with _open(url) as again:
            second = hashlib.blake2b(digest_size=_DIGEST)
            for chunk in _body(url, again, _Answer(again)):
                second.update(chunk)
            if second.hexdigest() != digest:
                _copies.pop().close()
                raise Transient("the body has no stated length, and differed when it was read a second time")
    if report is not None:
        report(f"{shown(url)}: the server does not serve ranges of it; copied {size:,} bytes to {path}")
    return InputFile(url, size, facts.version or f"blake2b={digest}", address=path)


def _body(url: str, response: http.client.HTTPResponse, facts: _Answer) -> Iterator[bytes]:
    """Yield the decoded content of the file. Raise Transient if the body ends early."""
    if not facts.is_encoded(url):
        came = 0
        while chunk := web().read(response, _CHUNK):
            came += len(chunk)
            yield chunk
        if facts.size is not None and came != facts.size:
            raise Transient(f"the body ended after {came:,} of {facts.size:,} bytes")
        return
    if facts.encoding != "gzip":
        raise ArgosyError(
            "data.fetch-failed",
            f"{shown(url)} comes with Content-Encoding: {facts.encoding}, though identity was asked for",
            fix="fetch the file by other means and prepare the copy",
        )
    content = gzip.GzipFile(fileobj=response)
    try:
        while chunk := content.read(_CHUNK):
            yield chunk
    except (OSError, EOFError, zlib.error, http.client.HTTPException) as error:
        raise Transient(f"the gzip-encoded body cannot be read: {error}") from None


def _keep(url: str, chunks: Iterator[bytes]) -> tuple[str, int, str]:
    """Write a temporary file that lives as long as this process. Return (path, bytes, digest)."""
    copy = tempfile.NamedTemporaryFile(prefix="argosy-input-")  # noqa: SIM115
    digest, size = hashlib.blake2b(digest_size=_DIGEST), 0
    try:
        for chunk in chunks:
            copy.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        copy.flush()
    except OSError as error:
        copy.close()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ArgosyError(
            "data.write-failed",
            f"{shown(url)} has to be copied to {tempfile.gettempdir()}, since its server does not serve ranges: {error.strerror}",
            fix="set TMPDIR to a directory with more space",
        ) from None
    except BaseException:
        copy.close()
        raise
    _copies.append(copy)
    return copy.name, size, digest.hexdigest()

"""Download one file: resume a partial download, verify the checksum, then rename.

Bytes are written to `NAME.partial`. After a kill the partial file is hashed from disk and continued with a range request. If
the server has another file by now, or ignores ranges, the download starts over. The whole file is compared with the hash that
the Hub lists (sha256, or git's sha1 for small files) or that was given with the URL.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from argosy.data.remote.hub import RemoteFile
from argosy.data.remote.web import BadStatus, Web
from argosy.errors import ArgosyError
from argosy.retry import Transient

_CHUNK = 1 << 20


class Digest:
    """The sha256 of the bytes so far, and git's blob hash if that is the one the Hub lists."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._git: Any = None
        if file.git_sha1 is not None:
            algorithm = hashlib.sha256 if len(file.git_sha1) == 64 else hashlib.sha1
            self._git = algorithm(b"blob %d\0" % file.size, usedforsecurity=False)

    def update(self, chunk: bytes) -> None:
        """Hash the next bytes."""
        self._sha256.update(chunk)
        if self._git is not None:
            self._git.update(chunk)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def fault(self) -> str | None:
        """Return the difference from the expected hash, or None if they agree or no hash is known."""
        if self._file.sha256 is not None and self._file.sha256 != self.sha256:
            return f"its sha256 is {self.sha256}, and should be {self._file.sha256}"
        if self._git is not None and self._git.hexdigest() != self._file.git_sha1:
            return f"its git hash is {self._git.hexdigest()}, and should be {self._file.git_sha1}"
        return None


def hash_file(path: Path, file: RemoteFile) -> Digest:
    """Hash a local file that should be `file`."""
    digest = Digest(file)
    with path.open("rb") as stored:
        while chunk := stored.read(_CHUNK):
            digest.update(chunk)
    return digest


class Download:
    """The download of one file. `advance` receives the bytes gained, and negative numbers when the download starts over."""

    def __init__(self, web: Web, file: RemoteFile, partial: Path, advance: Callable[[int], None]) -> None:
        self.web, self.file, self.partial, self.advance = web, file, partial, advance
        self.have = 0
        self.digest = Digest(file)

    def run(self) -> str:
        """Download the missing bytes into the partial file, verify the whole file, and return its sha256."""
        descriptor = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "r+b") as stored:
            self._hash_stored(stored)
            self._complete(stored)
            # The partial file may have been of another revision, or damaged.
            if self.digest.fault():
                self._start_over(stored)
                self._complete(stored)
                if fault := self.digest.fault():
                    self._start_over(stored)
                    raise ArgosyError(
                        "data.fetch-failed",
                        f"{self.file.origin}: {self.file.path} failed its checksum twice: {fault}",
                        fix="a proxy or a mirror changes the file, or the file on the server is damaged",
                    )
            stored.flush()
            os.fsync(stored.fileno())
        return self.digest.sha256

    def _hash_stored(self, stored: BinaryIO) -> None:
        if os.fstat(stored.fileno()).st_size > self.file.size:
            stored.truncate(0)
        while chunk := stored.read(_CHUNK):
            self.digest.update(chunk)
            self._count(len(chunk))

    def _complete(self, stored: BinaryIO) -> None:
        if self.have < self.file.size:
            self.web.retry(f"{self.file.origin}: {self.file.path}", lambda: self._receive(stored))

    def _receive(self, stored: BinaryIO) -> None:
        # Without a hash or a validator nothing proves that the rest belongs to the same file.
        if self.have and not (self.file.has_hash or self.file.validator):
            self._start_over(stored)
        first = self.have
        headers = {"Range": f"bytes={first}-"} if first else {}
        if first and self.file.validator:
            headers["If-Range"] = self.file.validator
        try:
            response = self.web.open(self.file.url, headers, other_hosts=self.file.on_hub)
        except BadStatus as error:
            if error.status != 416 or not first:
                raise
            self._start_over(stored)
            raise Transient("the server refuses the requested range") from None
        with response:
            if response.status != 206 and first:
                self._start_over(stored)
            self._check_length(response.status, response.headers.get)
            while self.have < self.file.size:
                try:
                    chunk = self.web.read(response, min(_CHUNK, self.file.size - self.have))
                except Transient as trouble:
                    raise Transient(str(trouble), progressed=self.have > first) from None
                if not chunk:
                    raise Transient(
                        f"the body ended after {self.have:,} of {self.file.size:,} bytes", progressed=self.have > first
                    )
                stored.write(chunk)
                self.digest.update(chunk)
                self._count(len(chunk))

    def _check_length(self, status: int, header: Callable[[str, str], str]) -> None:
        """Check that the response is the rest of a file of the listed size, not an error page or another file."""
        if status == 206:
            expected = f"bytes {self.have}-{self.file.size - 1}/{self.file.size}"
            if header("Content-Range", "") not in (expected, re.sub(r"/\d+$", "/*", expected)):
                raise Transient(f"the server sent {header('Content-Range', 'no range')} where {expected} was expected")
        elif header("Content-Length", str(self.file.size)) != str(self.file.size):
            raise Transient(f"the server sent {header('Content-Length', '')} bytes where {self.file.size} were listed")

    def _start_over(self, stored: BinaryIO) -> None:
        stored.seek(0)
        stored.truncate(0)
        self._count(-self.have)
        self.digest = Digest(self.file)

    def _count(self, gained: int) -> None:
        self.have += gained
        self.advance(gained)


def explain(error: BadStatus) -> ArgosyError:
    """Return the error for a 4xx of a plain URL. `Hub.explain` does it for the Hub."""
    fix = "check the URL; one that needs a login cannot be fetched"
    return ArgosyError("data.fetch-refused", str(error), fix=fix)

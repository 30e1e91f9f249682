"""An LRU cache directory of downloaded blocks, shared by any number of processes on one machine without a server.

    CACHE/argosy-usage                              bytes in use and when they were last counted, under flock
    CACHE/argosy-KEY/                               one corpus at one address: manifest, tokenizer, .idx and .blocks files
    CACHE/argosy-KEY/in-use                         locked (shared) by every process that has the corpus open
    CACHE/argosy-KEY/blocks/SHARD-VERSION-SIZE/N    block N of a .bin: its bytes, then their sha256
    …/N.partial                                     a block being downloaded, locked by the process that downloads it

Locks are flocks, which the kernel releases when a process dies, so there is nothing to clean up after a crash. A block is
renamed to its name when it is complete, and carries its checksum, which each process verifies once. So a torn write after a
power cut is downloaded again instead of trained on. The partial file is its own lock: the process that locks it downloads, the
others wait and find the block.

The limit applies to the total of all processes: blocks are written under the lock on the usage file, after the least recently
used blocks have been evicted. Files with other names are neither counted nor touched. A reader holds the file open while it
reads, so eviction cannot interrupt it. A block that does not fit in the cache is returned from memory, so no reader ever waits
for space.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from argosy.data.remote.shared_files import FLAGS, entries, file_sha256, fits, is_idle, is_same, pread, unlink
from argosy.errors import ArgosyError
from argosy.files import replace_file

# The sha256 after the content of a block.
CHECKSUM_BYTES = 32
_CORPUS = re.compile(r"argosy-[0-9a-f]{32}")
_BLOCKS = re.compile(r".+-[0-9a-f]{16}-\d+")
_BLOCK = re.compile(r"(\d{8}|whole)(\.partial)?")
_INDEX = re.compile(r".+\.(idx|blocks)")
_PARTIAL = ".partial"
_LONGEST_POLL_S = 0.05
_USAGE_WAIT_S = 30.0
# The usage file is recounted after this time.
_RECOUNT_S = 600.0
# The number of verified blocks that a process remembers.
_MAX_VERIFIED = 200_000
# A block read again within this time keeps its old access time.
_TOUCH_NS = 10**9


@dataclass(frozen=True)
class _Evictable:
    used_ns: int
    size: int
    path: str


class BlockCache:
    """The cache. `wait_s` is how long to wait for another process that downloads a block, before downloading it here."""

    def __init__(self, directory: Path, limit: int | None, *, wait_s: float = 300.0) -> None:
        self.directory, self.limit, self.wait_s = directory, limit, wait_s
        # Returns the paths that are evicted last.
        self.keep: Callable[[], set[str]] = set
        # inode -> mtime of blocks whose checksum was verified.
        self._verified: dict[int, int] = {}
        self._in_use: list[int] = []
        # Monotonic time. Until then nobody waits for the lock on the usage file, because a hung process holds it.
        self._held_until = 0.0
        with self._refusing():
            directory.mkdir(parents=True, exist_ok=True)

    def open_corpus(self, key: str) -> Path:
        """Return the directory of a corpus, locked as in use until this process ends or closes the cache."""
        corpus = self.directory / f"argosy-{key}"
        with self._refusing():
            (corpus / "blocks").mkdir(parents=True, exist_ok=True)
            fd = os.open(corpus / "in-use", os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
            fcntl.flock(fd, fcntl.LOCK_SH)
        self._in_use.append(fd)
        return corpus

    def close(self) -> None:
        """Release the in-use locks."""
        while self._in_use:
            os.close(self._in_use.pop())

    def trim(self) -> None:
        """Evict blocks of earlier runs until the cache is within the limit."""
        if self.limit is not None:
            with self._usage() as usage:
                if usage is not None:
                    self._make_room(usage, 0)

    def load(self, path: str, size: int, start: int, count: int) -> bytes | None:
        """Read `count` bytes at `start` of a block of `size` bytes, or return None if it is missing or damaged."""
        try:
            fd = os.open(path, os.O_RDONLY | FLAGS)
        except OSError:
            return None
        try:
            about = os.fstat(fd)
            if about.st_size != size + CHECKSUM_BYTES or not stat.S_ISREG(about.st_mode):
                return None
            if self._verified.get(about.st_ino) != about.st_mtime_ns and not self._verify(fd, size, about):
                return None
            now = time.time_ns()
            if now - about.st_atime_ns > _TOUCH_NS:
                # The file may belong to another user; then its access time stays as it is.
                with contextlib.suppress(OSError):
                    os.utime(fd, ns=(now, about.st_mtime_ns))
            return pread(fd, start, count)
        except OSError:
            return None
        finally:
            os.close(fd)

    def fill(self, path: str, size: int, fetch: Callable[[], bytes]) -> bytes:
        """Return a whole block: from the cache, or by `fetch`, or from another process that downloads it meanwhile."""
        with self._claim(path, lambda: self.load(path, size, 0, size) is not None) as partial:
            if (content := self.load(path, size, 0, size)) is not None:
                return content
            content = fetch()
            if partial is not None:
                self._keep(partial, path, content + hashlib.sha256(content).digest())
            return content

    def fill_file(self, path: Path, sha256: str, chunks: Callable[[], Iterator[bytes]]) -> None:
        """Store a plain file with a known sha256. It is needed on disk as a whole, so it is written even past the limit."""
        with self._claim(str(path), lambda: file_sha256(path) == sha256) as partial:
            if file_sha256(path) == sha256:
                return
            target = partial.path if partial is not None else f"{path}.{os.urandom(6).hex()}{_PARTIAL}"
            for attempt in (1, 2):
                digest, size = hashlib.sha256(), 0
                with self._refusing(), open(target, "wb") as file:
                    for chunk in chunks():
                        digest.update(chunk)
                        size += file.write(chunk)
                if digest.hexdigest() == sha256:
                    break
                if attempt == 2:
                    os.unlink(target)
                    raise ArgosyError(
                        "data.corrupt",
                        f"{path.name} as stored has sha256 {digest.hexdigest()[:16]}…, its manifest says {sha256[:16]}…",
                        fix="upload the corpus again from a copy that `argosy data verify` accepts",
                    )
            with self._usage() as usage, self._refusing():
                if usage is not None:
                    self._make_room(usage, size).plus(size).write(usage)
                os.replace(target, path)

    def keep_file(self, path: Path, content: bytes) -> None:
        """Store a small plain file with this content."""
        with self._refusing():
            if not path.is_file() or path.read_bytes() != content:
                replace_file(path, content)

    def drop(self, paths: list[str]) -> None:
        """Remove blocks that turned out to be wrong."""
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def scan(self) -> tuple[int, list[_Evictable]]:
        """Return the bytes in the cache, and the files that may be evicted."""
        used, old = 0, []
        for corpus in entries(self.directory, _CORPUS, directory_wanted=True):
            idle = is_idle(os.path.join(corpus.path, "in-use"))
            for file in entries(corpus.path, _INDEX, directory_wanted=False):
                about = file.stat(follow_symlinks=False)
                used += about.st_size
                if idle:
                    old.append(_Evictable(about.st_atime_ns, about.st_size, file.path))
            for blocks in entries(os.path.join(corpus.path, "blocks"), _BLOCKS, directory_wanted=True):
                for file in entries(blocks.path, _BLOCK, directory_wanted=False):
                    with contextlib.suppress(FileNotFoundError):
                        about = file.stat(follow_symlinks=False)
                        used += about.st_size
                        old.append(_Evictable(about.st_atime_ns, about.st_size, file.path))
        return used, old

    def _verify(self, fd: int, size: int, about: os.stat_result) -> bool:
        whole = pread(fd, 0, size + CHECKSUM_BYTES)
        if hashlib.sha256(whole[:size]).digest() != whole[size:]:
            return False
        if len(self._verified) >= _MAX_VERIFIED:
            self._verified.clear()
        self._verified[about.st_ino] = about.st_mtime_ns
        return True

    @contextlib.contextmanager
    def _claim(self, path: str, arrived: Callable[[], bool]) -> Iterator[_Partial | None]:
        """Hold the lock on downloading `path`. Yield None if another process held it for too long, or `path` has arrived."""
        partial, poll, deadline = f"{path}{_PARTIAL}", 0.002, time.monotonic() + self.wait_s
        while True:
            fd = self._lock_partial(partial)
            if fd is not None:
                break
            if time.monotonic() > deadline or arrived():
                yield None
                return
            time.sleep(poll)
            poll = min(2 * poll, _LONGEST_POLL_S)
        try:
            yield _Partial(fd, partial)
        finally:
            # The file was not renamed, so nothing was downloaded.
            if is_same(fd, partial):
                with contextlib.suppress(OSError):
                    os.unlink(partial)
            os.close(fd)

    def _lock_partial(self, partial: str) -> int | None:
        with self._refusing():
            try:
                fd = os.open(partial, os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
            except FileNotFoundError:
                # This is the first block of its shard, or someone emptied the cache.
                os.makedirs(os.path.dirname(partial), exist_ok=True)
                fd = os.open(partial, os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
        if is_same(fd, partial):
            return fd
        # Its holder renamed or removed it between our open and our lock.
        os.close(fd)
        return None

    def _keep(self, partial: _Partial, path: str, sealed: bytes) -> None:
        """Evict, write and rename a block under the lock on the usage file, so that the limit holds at any moment.

        If there is not enough room, the block is not stored.
        """
        with self._usage() as usage:
            if usage is None:
                return
            count = self._make_room(usage, len(sealed))
            if self.limit is not None and count.used + len(sealed) > self.limit:
                return
            count.plus(len(sealed)).write(usage)
            if not fits(partial.fd, sealed):
                # The disk is full before the limit is reached.
                count = self._evict(*self.scan(), 2 * len(sealed))
                if not fits(partial.fd, sealed):
                    # The disk is full with other data: the block is not stored, and the run continues.
                    count.write(usage)
                    return
                count.plus(len(sealed)).write(usage)
            # Someone may have emptied the cache.
            with contextlib.suppress(FileNotFoundError):
                os.replace(partial.path, path)

    def _make_room(self, usage: int, size: int) -> _Count:
        """Evict until `size` more bytes fit, as far as possible. Return the usage."""
        count = _Count.read(usage)
        if count is None:
            count = _Count(self.scan()[0], int(time.time()))
        if self.limit is not None and count.used + size > self.limit:
            used, old = self.scan()
            count = self._evict(used, old, used + size - self.limit)
        count.write(usage)
        return count

    def _evict(self, used: int, old: list[_Evictable], least: int) -> _Count:
        """Remove the least recently used files: at least `least` bytes and a tenth of all, so that not every block evicts.

        Blocks that will be read next are evicted last.
        """
        keep = self.keep()
        goal = used - max(least, sum(file.size for file in old) // 10) if least > 0 else used
        for file in sorted(old, key=lambda file: (file.path in keep, file.used_ns)):
            if used <= goal:
                break
            if unlink(file.path, _lock_on(file.path)):
                used -= file.size
        return _Count(used, int(time.time()))

    @contextlib.contextmanager
    def _usage(self) -> Iterator[int | None]:
        """Lock the usage file. Yield None if another process has held the lock for too long."""
        with self._refusing():
            fd = os.open(self.directory / "argosy-usage", os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
            try:
                locked = self._lock_usage(fd)
                yield fd if locked else None
            finally:
                os.close(fd)

    def _lock_usage(self, fd: int) -> bool:
        """Return True if the lock was acquired. After one timeout nobody waits for a while, else every block would time out."""
        began = time.monotonic()
        timeout = 0.0 if began < self._held_until else _USAGE_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() - began < timeout:
                    time.sleep(0.002)
                    continue
                if timeout:
                    self._held_until = time.monotonic() + _USAGE_WAIT_S
                return False

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ArgosyError(
                "data.write-failed",
                f"the cache {self.directory} cannot be used: {error.strerror} ({error.filename or 'writing a block'})",
                key="data.train.cache",
                value=str(self.directory),
                fix="name a directory on a local disk with room and flock; cache_limit says how much it may hold",
            ) from None


@dataclass(frozen=True)
class _Count:
    """The content of the usage file.

    A file is counted before it is written, and uncounted after it is removed. So a kill leaves the count too high, never too
    low. It is recounted after `_RECOUNT_S`.
    """

    used: int
    counted_at: int

    @classmethod
    def read(cls, fd: int) -> _Count | None:
        found = re.fullmatch(rb"(\d{1,20}) (\d{1,12})\n", pread(fd, 0, 40))
        if found is None or abs(time.time() - int(found[2])) > _RECOUNT_S:
            return None
        return cls(int(found[1]), int(found[2]))

    def plus(self, size: int) -> _Count:
        return _Count(self.used + size, self.counted_at)

    def write(self, fd: int) -> None:
        # A full disk leaves the file empty, and the usage is recounted.
        fits(fd, b"%d %d\n" % (self.used, self.counted_at))


@dataclass(frozen=True)
class _Partial:
    fd: int
    path: str


def _lock_on(path: str) -> str | None:
    """Return the lock that must be free before a file is evicted, or None.

    A partial file is its own lock. `.idx` and `.blocks` files need the in-use lock of their corpus. A block needs no lock, because
    its readers hold it open.
    """
    if path.endswith(_PARTIAL):
        return path
    return os.path.join(os.path.dirname(path), "in-use") if _INDEX.fullmatch(os.path.basename(path)) else None

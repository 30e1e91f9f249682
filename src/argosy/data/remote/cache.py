"""A directory of fetched blocks that any number of processes on one machine share, without a server or shared memory.

    CACHE/argosy-usage                              bytes written so far and when they were last counted, under flock
    CACHE/argosy-KEY/                               one corpus at one address: manifest, tokenizer, .idx and .blocks files
    CACHE/argosy-KEY/in-use                         locked (shared) by every process that has the corpus open
    CACHE/argosy-KEY/blocks/SHARD-VERSION-SIZE/N    block N of a .bin: its bytes, then their sha256
    …/N.partial                                     the same being fetched, locked by the process that fetches it

Locks are flocks on open files, so the kernel gives them up when a process dies, however it dies: there is nothing to
clean up after a crash. A block appears under its name whole (rename) and carries its hash, which each process checks
once, so that a torn write after a power cut is fetched again instead of trained on. The partial file is its own lock:
whoever locks it fetches, the others wait and find the block.

The limit holds for all that this cache wrote, by whichever process: blocks are written under the lock on the usage file,
after those used longest ago have made room. Names not of the form above are never counted nor touched. A
reader holds the file open while it reads, so evicting a block under it takes nothing away; and a block for which there
is no room is handed on from memory, so that no reader ever waits for room.
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

SEAL = 32  # bytes of sha256 after the content of a block
_CORPUS = re.compile(r"argosy-[0-9a-f]{32}")
_BLOCKS = re.compile(r".+-[0-9a-f]{16}-\d+")
_BLOCK = re.compile(r"(\d{8}|whole)(\.partial)?")
_INDEX = re.compile(r".+\.(idx|blocks)")
_PARTIAL = ".partial"
_LONGEST_POLL_S = 0.05
_USAGE_WAIT_S = 30.0
_BELIEVED_S = 600.0
_PROVEN = 200_000  # blocks whose check a process remembers
_TOUCH_NS = 10**9  # a block read again within this time keeps its old time of use


@dataclass(frozen=True)
class _Old:
    used_ns: int
    size: int
    path: str


class BlockCache:
    """See the module. `wait_s` is how long to wait for another process to fetch a block before fetching it oneself."""

    def __init__(self, directory: Path, limit: int | None, *, wait_s: float = 300.0) -> None:
        self.directory, self.limit, self.wait_s = directory, limit, wait_s
        self.keep: Callable[[], set[str]] = set  # paths that eviction leaves to the last
        self._proven: dict[int, int] = {}  # inode -> mtime of blocks whose hash was checked
        self._in_use: list[int] = []
        self._held_until = 0.0  # monotonic: a process that hangs has the usage file, and is not waited for until then
        with self._refusing():
            directory.mkdir(parents=True, exist_ok=True)

    def open_corpus(self, key: str) -> Path:
        """The directory of a corpus, marked as in use until this process ends or closes the cache."""
        corpus = self.directory / f"argosy-{key}"
        with self._refusing():
            (corpus / "blocks").mkdir(parents=True, exist_ok=True)
            fd = os.open(corpus / "in-use", os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
            fcntl.flock(fd, fcntl.LOCK_SH)
        self._in_use.append(fd)
        return corpus

    def close(self) -> None:
        while self._in_use:
            os.close(self._in_use.pop())

    def trim(self) -> None:
        """Bring what earlier runs left, under other limits perhaps, within this one."""
        if self.limit is not None:
            with self._usage() as usage:
                if usage is not None:
                    self._make_room(usage, 0)

    def load(self, path: str, size: int, start: int, count: int) -> bytes | None:
        """Bytes of a block of `size`, or None where it is not there or not whole."""
        try:
            fd = os.open(path, os.O_RDONLY | FLAGS)
        except OSError:
            return None
        try:
            about = os.fstat(fd)
            if about.st_size != size + SEAL or not stat.S_ISREG(about.st_mode):
                return None
            if self._proven.get(about.st_ino) != about.st_mtime_ns and not self._prove(fd, size, about):
                return None
            now = time.time_ns()
            if now - about.st_atime_ns > _TOUCH_NS:
                with contextlib.suppress(OSError):  # another user's file: its time of use stays as it is
                    os.utime(fd, ns=(now, about.st_mtime_ns))
            return pread(fd, start, count)
        except OSError:
            return None
        finally:
            os.close(fd)

    def fill(self, path: str, size: int, fetch: Callable[[], bytes]) -> bytes:
        """The whole block: from the cache, or fetched by this process and kept, or fetched by another meanwhile."""
        with self._claim(path, lambda: self.load(path, size, 0, size) is not None) as partial:
            if (content := self.load(path, size, 0, size)) is not None:
                return content
            content = fetch()
            if partial is not None:
                self._keep(partial, path, content + hashlib.sha256(content).digest())
            return content

    def fill_file(self, path: Path, sha256: str, chunks: Callable[[], Iterator[bytes]]) -> None:
        """A plain file with a known hash. It is needed whole, on disk, so it is written even past the limit."""
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
                        fix="upload the corpus again from where `argosy data verify` finds it whole",
                    )
            with self._usage() as usage, self._refusing():
                count = self._make_room(usage, size) if usage is not None else None
                os.replace(target, path)
                if usage is not None and count is not None:
                    count.plus(size).write(usage)

    def keep_file(self, path: Path, content: bytes) -> None:
        """A small plain file with this content."""
        with self._refusing():
            if not path.is_file() or path.read_bytes() != content:
                replace_file(path, content)

    def drop(self, paths: list[str]) -> None:
        """Forget blocks that turned out wrong."""
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def scan(self) -> tuple[int, list[_Old]]:
        """Bytes this cache holds, and what of it may be evicted."""
        used, old = 0, []
        for corpus in entries(self.directory, _CORPUS, directory_wanted=True):
            idle = is_idle(os.path.join(corpus.path, "in-use"))
            for file in entries(corpus.path, _INDEX, directory_wanted=False):
                about = file.stat(follow_symlinks=False)
                used += about.st_size
                if idle:
                    old.append(_Old(about.st_atime_ns, about.st_size, file.path))
            for blocks in entries(os.path.join(corpus.path, "blocks"), _BLOCKS, directory_wanted=True):
                for file in entries(blocks.path, _BLOCK, directory_wanted=False):
                    with contextlib.suppress(FileNotFoundError):
                        about = file.stat(follow_symlinks=False)
                        used += about.st_size
                        old.append(_Old(about.st_atime_ns, about.st_size, file.path))
        return used, old

    def _prove(self, fd: int, size: int, about: os.stat_result) -> bool:
        whole = pread(fd, 0, size + SEAL)
        if hashlib.sha256(whole[:size]).digest() != whole[size:]:
            return False
        if len(self._proven) >= _PROVEN:
            self._proven.clear()
        self._proven[about.st_ino] = about.st_mtime_ns
        return True

    @contextlib.contextmanager
    def _claim(self, path: str, arrived: Callable[[], bool]) -> Iterator[_Partial | None]:
        """Hold the lock on fetching `path`. None: another process has held it for too long, or `path` has arrived."""
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
            if is_same(fd, partial):  # not renamed: nothing was fetched
                with contextlib.suppress(OSError):
                    os.unlink(partial)
            os.close(fd)

    def _lock_partial(self, partial: str) -> int | None:
        with self._refusing():
            try:
                fd = os.open(partial, os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
            except FileNotFoundError:  # the first block of its shard, or someone emptied the cache
                os.makedirs(os.path.dirname(partial), exist_ok=True)
                fd = os.open(partial, os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
        if is_same(fd, partial):
            return fd
        os.close(fd)  # its holder renamed or removed it between our open and our lock
        return None

    def _keep(self, partial: _Partial, path: str, sealed: bytes) -> None:
        """Make room, write and name a block, all under the lock on the usage file, so that the limit holds at any
        moment. Where no room can be made the block is not kept."""
        with self._usage() as usage:
            if usage is None:
                return
            count = self._make_room(usage, len(sealed))
            if self.limit is not None and count.used + len(sealed) > self.limit:
                return
            if not fits(partial.fd, sealed):
                count = self._evict(*self.scan(), 2 * len(sealed))  # the disk is full before the limit is
                if not fits(partial.fd, sealed):  # with what others wrote: the block is not kept, the run goes on
                    return
            with contextlib.suppress(FileNotFoundError):  # someone emptied the cache under us
                os.replace(partial.path, path)
            count.plus(len(sealed)).write(usage)

    def _make_room(self, usage: int, size: int) -> _Count:
        """What is used once there is room for `size` more, as far as there can be."""
        count = _Count.read(usage)
        if count is None:
            count = _Count(self.scan()[0], int(time.time()))
        if self.limit is not None and count.used + size > self.limit:
            used, old = self.scan()
            count = self._evict(used, old, used + size - self.limit)
        count.write(usage)
        return count

    def _evict(self, used: int, old: list[_Old], least: int) -> _Count:
        """Remove what was used longest ago, `least` bytes and a tenth of all at least, so as not to come back for
        every block; what is about to be read goes last."""
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
        """The usage file, locked; None where another process has held it for too long (stopped, perhaps)."""
        with self._refusing():
            fd = os.open(self.directory / "argosy-usage", os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
            try:
                locked = self._lock_usage(fd)
                yield fd if locked else None
            finally:
                os.close(fd)

    def _lock_usage(self, fd: int) -> bool:
        """Whether it could be locked. After one long wait in vain nobody waits for a while, or each block would."""
        began = time.monotonic()
        patience = 0.0 if began < self._held_until else _USAGE_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() - began < patience:
                    time.sleep(0.002)
                    continue
                if patience:
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
    """The usage file. It drifts by what a kill leaves out, so it is believed for `_BELIEVED_S` only."""

    used: int
    counted_at: int

    @classmethod
    def read(cls, fd: int) -> _Count | None:
        found = re.fullmatch(rb"(\d{1,20}) (\d{1,12})\n", pread(fd, 0, 40))
        if found is None or abs(time.time() - int(found[2])) > _BELIEVED_S:
            return None
        return cls(int(found[1]), int(found[2]))

    def plus(self, size: int) -> _Count:
        return _Count(self.used + size, self.counted_at)

    def write(self, fd: int) -> None:
        fits(fd, b"%d %d\n" % (self.used, self.counted_at))  # left empty by a full disk, it is counted anew


@dataclass(frozen=True)
class _Partial:
    fd: int
    path: str


def _lock_on(path: str) -> str | None:
    """What has to be free for a file to be evicted: a partial one from whoever fetches it, one that a corpus keeps from
    all who have that open. A block needs nothing: its readers hold it open."""
    if path.endswith(_PARTIAL):
        return path
    return os.path.join(os.path.dirname(path), "in-use") if _INDEX.fullmatch(os.path.basename(path)) else None

"""The reader of one shard of a streamed corpus: its `.idx` is in the cache, the blocks of its `.bin` are downloaded on demand.

Each block is verified against its checksum in `NAME.blocks`, which itself is verified against the manifest. Corpora of earlier
versions have one hash for a whole `.bin`. For them, the length of each block is checked, the object's version (ETag) is checked
again every `RECHECK_S` seconds while blocks are downloaded, and the hash is checked once all blocks are in the cache. Until
then, a block that is damaged in the store goes unnoticed. In the cache each block carries its own checksum (cache.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path

import numpy as np

from argosy.data.corpus.block_hashes import BLOCK, Bytes, wrong_blocks
from argosy.data.corpus.corpus_manifest import Shard
from argosy.data.corpus.indexed import IndexedReader, Tokens
from argosy.data.remote.ahead import ReadAhead
from argosy.data.remote.cache import CHECKSUM_BYTES, BlockCache
from argosy.data.remote.objects import ObjectFacts, ObjectStore
from argosy.errors import ArgosyError

RECHECK_S = 60.0  # seconds


class StreamedReader(IndexedReader):
    """A pair whose `.idx` is in the cache and whose `.bin` is in the store. `digests` are the block hashes of the `.bin`."""

    def __init__(
        self,
        prefix: Path,
        store: ObjectStore,
        cache: BlockCache,
        promised: Shard,
        block_bytes: int,
        digests: Bytes | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self._digests = digests if block_bytes % BLOCK == 0 else None
        self._store, self._cache, self._promised = store, cache, promised
        self._object = f"{promised.name}.bin"
        self._lock = threading.Lock()
        # Blocks known to be in the cache. Used until the whole shard is verified.
        self._seen: set[int] = set()
        # Paths of blocks downloaded since the object was last seen unchanged.
        self._unverified: list[str] = []
        self._fault: ArgosyError | None = None
        self._number, self._ahead = 0, ReadAhead(lambda key: None, 0, None)
        super().__init__(prefix)

    @property
    def blocks(self) -> int:
        return -(-self.tokens * self.dtype.itemsize // self.block_bytes)

    def attach(self, number: int, ahead: ReadAhead) -> None:
        """Set the prefetcher, and the number of this shard in its keys."""
        self._number, self._ahead = number, ahead

    def read(self, start: int, count: int) -> Tokens:
        """Read `count` tokens from token `start` on, from the cache or the store."""
        at, end = start * self.dtype.itemsize, (start + count) * self.dtype.itemsize
        if not 0 <= at <= end <= self.tokens * self.dtype.itemsize:
            raise IndexError(f"tokens {start} to {start + count} of {self.tokens}")
        pieces = []
        while at < end:
            block, offset = divmod(at, self.block_bytes)
            here = min(end - at, self.block_bytes - offset)
            pieces.append(self._read_block(block, offset, here))
            at += here
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), self.dtype)

    def block_path(self, block: int) -> str:
        return f"{self._directory}/{block:08d}"

    def fetch_ahead(self, block: int) -> None:
        """Download a block into the cache, unless it is there."""
        if self._cache.load(self.block_path(block), self._size_of(block), 0, 0) is None:
            self._fill(block)
        self._saw(block)

    def close(self) -> None:
        self._store.close()

    def _open_bin(self) -> int:
        """Check the size of the object against the `.idx`. There is no local file to open, so return -1."""
        self._facts = self._store.facts(self._object)
        promised = self.tokens * self.dtype.itemsize
        if self._facts.size not in (None, promised):
            raise ArgosyError(
                "data.corrupt",
                f"{self._store.name(self._object)} has {self._facts.size:,} bytes, but its .idx promises "
                f"{self.tokens:,} tokens of {self.dtype.itemsize} = {promised:,} bytes",
                fix="upload the corpus again from a copy that `argosy data verify` accepts",
            )
        self._looked = time.monotonic()
        version = hashlib.sha256(f"{self._facts.version} {promised}".encode()).hexdigest()[:16]
        self._directory = f"{self.prefix.parent}/blocks/{self.prefix.name}-{version}-{self.block_bytes}"
        if self._digests is not None:
            self._whole = True
            return -1
        checked = self._cache.load(f"{self._directory}/whole", CHECKSUM_BYTES, 0, CHECKSUM_BYTES)
        self._whole = checked is not None and checked.hex() == self._promised.bin_sha256
        if not self._whole:
            with contextlib.suppress(FileNotFoundError):
                self._seen = {int(name) for name in os.listdir(self._directory) if name.isdigit()}
        return -1

    def _size_of(self, block: int) -> int:
        return min(self.block_bytes, self.tokens * self.dtype.itemsize - block * self.block_bytes)

    def _read_block(self, block: int, offset: int, count: int) -> bytes:
        if self._fault is not None:
            raise self._fault
        path, size = self.block_path(block), self._size_of(block)
        self._ahead.take((self._number, block))
        content = self._cache.load(path, size, offset, count)
        if content is None:
            content = self._fill(block)[offset : offset + count]
        self._saw(block)
        return content

    def _fill(self, block: int) -> bytes:
        def fetch() -> bytes:
            if self._digests is not None:
                return self._fetch_checked(block, self._digests)
            content = self._fetch(block)
            self._look_again(self.block_path(block))
            if self._fault is not None:
                raise self._fault
            return content

        return self._cache.fill(self.block_path(block), self._size_of(block), fetch)

    def _fetch(self, block: int) -> bytes:
        return self._store.read(self._object, block * self.block_bytes, self._size_of(block), self._facts.version)

    def _fetch_checked(self, block: int, digests: Bytes) -> bytes:
        """Download a block and verify its checksum. Retry once, in case it was damaged in transit."""
        first = block * self.block_bytes // BLOCK
        for _ in range(2):
            content = self._fetch(block)
            wrong = list(wrong_blocks(digests, first, content))
            if not wrong:
                return content
        raise ArgosyError(
            "data.corrupt",
            f"{self._store.name(self._object)}: block {wrong[0]:,} (from byte {wrong[0] * BLOCK:,}) failed its checksum twice",
            fix="it was damaged or replaced: upload the corpus again from a copy that `argosy data verify` accepts",
        )

    def _look_again(self, path: str) -> None:
        """Check every RECHECK_S seconds that the object is unchanged. If it changed, drop the blocks since the last check."""
        with self._lock:
            self._unverified.append(path)
            if time.monotonic() - self._looked < RECHECK_S:
                return
            self._looked, recent = time.monotonic(), self._unverified[:]
        now = self._store.facts(self._object)
        if now != self._facts:
            refusal = self._changed(now)
            self._cache.drop(recent)
            raise refusal
        with self._lock:
            del self._unverified[: len(recent)]

    def _changed(self, now: ObjectFacts) -> ArgosyError:
        self._fault = ArgosyError(
            "data.corrupt",
            f"{self._store.name(self._object)} was replaced while in use: it was {self._facts.version} of "
            f"{self._facts.size} bytes and is now {now.version} of {now.size}",
            fix="start again; prepare a new corpus under a new name rather than over one in use",
        )
        return self._fault

    def _saw(self, block: int) -> None:
        if self._whole:
            return
        with self._lock:
            self._seen.add(block)
            if len(self._seen) < self.blocks or self._whole:
                return
            self._whole = True
        self._ahead.run_in_background(self._check_whole)

    def _check_whole(self) -> None:
        """Hash the `.bin` once all its blocks are in the cache. Only the first process that shares the cache does it."""
        wrong = ""

        def digest_of_blocks() -> bytes:
            nonlocal wrong
            digest = hashlib.sha256()
            for block in range(self.blocks):
                content = self._cache.load(self.block_path(block), self._size_of(block), 0, self._size_of(block))
                if content is None:
                    raise _Evicted
                digest.update(content)
            wrong = digest.hexdigest() if digest.hexdigest() != self._promised.bin_sha256 else ""
            if wrong:
                raise _Evicted
            return digest.digest()

        try:
            self._cache.fill(f"{self._directory}/whole", CHECKSUM_BYTES, digest_of_blocks)
        except _Evicted:
            with self._lock:
                self._seen.clear()
                self._whole = False
        if wrong:
            self._fault = ArgosyError(
                "data.corrupt",
                f"{self._store.name(self._object)} as stored has sha256 {wrong[:16]}…, its manifest says "
                f"{self._promised.bin_sha256[:16]}…; its blocks were dropped from the cache",
                fix="upload the corpus again from a copy that `argosy data verify` accepts",
            )
            self._cache.drop([self.block_path(block) for block in range(self.blocks)])


class _Evicted(Exception):
    """A block was evicted before the whole shard could be checked."""

"""One shard of a streamed corpus: its `.idx` in the cache, the blocks of its `.bin` fetched from the store as they are read.

What is checked: each block as it arrives against its hash, where the corpus has them (`NAME.blocks`, itself checked
against the manifest). Corpora of earlier versions have one hash for a whole `.bin`: there each block is held against the
length asked for, the object's version (ETag) is looked at again at least every `RECHECK_S` while blocks are fetched, and
the hash is checked once all blocks are in the cache; until then a block that the store itself spoiled would pass. Once
in the cache a block carries its own hash (cache.py).
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
from argosy.data.remote.cache import SEAL, BlockCache
from argosy.data.remote.objects import ObjectFacts, ObjectStore
from argosy.errors import ArgosyError

RECHECK_S = 60.0


class StreamedReader(IndexedReader):
    """One pair whose `.idx` is in the cache and whose `.bin` is in the store. `digests`: of the blocks of the `.bin`."""

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
        self._seen: set[int] = set()  # blocks known to be in the cache, until the whole has been checked
        self._unproven: list[str] = []  # fetched since the object was last seen unchanged
        self._fault: ArgosyError | None = None
        self._number, self._ahead = 0, ReadAhead(lambda key: None, 0, None)
        super().__init__(prefix)

    @property
    def blocks(self) -> int:
        return -(-self.tokens * self.dtype.itemsize // self.block_bytes)

    def attach(self, number: int, ahead: ReadAhead) -> None:
        self._number, self._ahead = number, ahead

    def read(self, start: int, count: int) -> Tokens:
        """`count` tokens from token `start` on, from the cache or the store."""
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
        if self._cache.load(self.block_path(block), self._size_of(block), 0, 0) is None:
            self._fill(block)
        self._saw(block)

    def close(self) -> None:
        self._store.close()

    def _open_bin(self) -> int:
        """There is no file to open: look at the object, and hold its size against what the `.idx` promises."""
        self._facts = self._store.facts(self._object)
        promised = self.tokens * self.dtype.itemsize
        if self._facts.size not in (None, promised):
            raise ArgosyError(
                "data.corrupt",
                f"{self._store.name(self._object)} has {self._facts.size:,} bytes, but its .idx promises "
                f"{self.tokens:,} tokens of {self.dtype.itemsize} = {promised:,} bytes",
                fix="upload the corpus again from where `argosy data verify` finds it whole",
            )
        self._looked = time.monotonic()
        version = hashlib.sha256(f"{self._facts.version} {promised}".encode()).hexdigest()[:16]
        self._directory = f"{self.prefix.parent}/blocks/{self.prefix.name}-{version}-{self.block_bytes}"
        if self._digests is not None:
            self._whole = True
            return -1
        checked = self._cache.load(f"{self._directory}/whole", SEAL, 0, SEAL)
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
        """A block that is what it was when the corpus was made. One spoiled on its way comes right the second time."""
        first = block * self.block_bytes // BLOCK
        for _ in range(2):
            content = self._fetch(block)
            wrong = list(wrong_blocks(digests, first, content))
            if not wrong:
                return content
        raise ArgosyError(
            "data.corrupt",
            f"{self._store.name(self._object)}: block {wrong[0]:,} (from byte {wrong[0] * BLOCK:,}) came twice with another "
            "hash than it had when the corpus was made",
            fix="it was damaged or replaced: upload the corpus again from where `argosy data verify` finds it whole",
        )

    def _look_again(self, path: str) -> None:
        """Now and then, hold the object against what it was at the start; a block just fetched counts only after."""
        with self._lock:
            self._unproven.append(path)
            if time.monotonic() - self._looked < RECHECK_S:
                return
            self._looked, proven = time.monotonic(), self._unproven[:]
        now = self._store.facts(self._object)
        if now != self._facts:
            refusal = self._changed(now)
            self._cache.drop(proven)
            raise refusal
        with self._lock:
            del self._unproven[: len(proven)]

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
        self._ahead.afterwards(self._check_whole)

    def _check_whole(self) -> None:
        """Hash the `.bin` once all of it is in the cache: once for each cache, by whichever process comes first."""
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
            self._cache.fill(f"{self._directory}/whole", SEAL, digest_of_blocks)
        except _Evicted:
            with self._lock:
                self._seen.clear()
                self._whole = False
        if wrong:
            self._fault = ArgosyError(
                "data.corrupt",
                f"{self._store.name(self._object)} as stored has sha256 {wrong[:16]}…, its manifest says "
                f"{self._promised.bin_sha256[:16]}…; its blocks were dropped from the cache",
                fix="upload the corpus again from where `argosy data verify` finds it whole",
            )
            self._cache.drop([self.block_path(block) for block in range(self.blocks)])


class _Evicted(Exception):
    """A block went before the whole shard could be checked."""

"""A prepared corpus that lies in object storage, read through a local cache as if it were on disk.

Why blocks and not shards: training visits windows of seq_len + 1 tokens (8 to 16 kB) in the order of a keyed bijection
over the whole corpus, so any batch touches shards everywhere. With whole shards the first batch would fetch the corpus,
and a cache smaller than the corpus would fetch a shard per sample. Fetched in blocks, a sample costs at most one or two
of them, and on average block x (1 - cache / corpus) bytes once the cache is warm:

    corpus 400 GB, cache 200 GB, 100 samples a second    whole 1 GB shards    50 GB/s
                                                         blocks of 1 MiB      52 MB/s
                                                         blocks of 256 KiB    13 MB/s

So blocks are small: 1 MiB where the whole corpus fits in the cache and each is fetched once, 256 KiB where it does not
(that half are read again later does not pay for their size). Neither order nor content depends on any of this: which
window is sample i is decided elsewhere, here are only its bytes. What hides the latency of the store is knowing the
order: `prefetch` is told the reads to come, and a few threads fetch those blocks in the order training needs them.

What is checked: each `.idx` against its sha256 in the manifest, at each start. Each block against the length asked
for; the object's version (ETag) at the start, with each request where the store can, and again at least every
`RECHECK_S` while blocks are fetched. The manifest has one hash for a whole `.bin`, so it is checked once all blocks of
a shard are in the cache; until then a block that the store itself spoiled would pass. From then on a block carries
its own hash (cache.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from argosy.data.corpus.corpus import Corpus
from argosy.data.corpus.indexed import HEADER, IndexedReader, Tokens
from argosy.data.corpus.manifest import FILE_NAME, Manifest, Shard, read_manifest
from argosy.data.remote.ahead import Key, ReadAhead
from argosy.data.remote.cache import SEAL, BlockCache
from argosy.data.remote.objects import ObjectFacts, ObjectStore
from argosy.errors import ArgosyError

BLOCK_WHOLE = 1 << 20  # bytes of a block where the corpus fits in the cache
BLOCK_PART = 1 << 18  # and where it does not
LEAST_BLOCKS = 8  # a cache must hold
RECHECK_S = 60.0


class StreamedCorpus(Corpus):
    """A corpus whose tokens are fetched as they are read. `path` is the local directory with manifest and tokenizer."""

    is_remote = True

    def __init__(
        self, url: str, path: Path, shards: list[StreamedReader], manifest: Manifest, cache: BlockCache, threads: int
    ) -> None:
        super().__init__(path, list(shards), manifest)
        self.url = url
        self._readers, self._cache = shards, cache
        room = None
        if cache.limit is not None:  # half for what is fetched ahead, half for what was read before
            room = max(1, cache.limit // 2 // (shards[0].block_bytes + SEAL))
        self.ahead = ReadAhead(self._fetch, threads, room)
        cache.keep = self._announced
        for number, reader in enumerate(shards):
            reader.attach(number, self.ahead)

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """All reads to come from now on, nearest first, as (start, count) in tokens; what was announced before and
        is not in it is forgotten. Returns at once; `read` never depends on it."""
        self.ahead.announce(self.blocks_of(ranges))

    def blocks_of(self, ranges: Sequence[tuple[int, int]]) -> list[Key]:
        """The blocks that reads of these ranges touch, each once, in order of first need."""
        if not len(ranges):
            return []
        asked = np.asarray(ranges, np.int64).reshape(-1, 2)
        first, last = self._locate(asked[:, 0]), self._locate(asked[:, 0] + np.maximum(asked[:, 1], 1) - 1)
        keys: dict[Key, None] = {}
        for (shard, block), end in zip(first, last, strict=True):
            while (shard, block) <= end:
                if block < self._readers[shard].blocks:
                    keys[shard, block] = None
                    block += 1
                else:
                    shard, block = shard + 1, 0
        return list(keys)

    def close(self) -> None:
        """Stop fetching ahead and give up the mark that the cached corpus is in use."""
        self.ahead.close()
        for reader in self._readers:
            reader.close()
        self._cache.close()

    def _locate(self, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Key]:
        tokens = np.clip(tokens, 0, max(0, self.tokens - 1))
        shard = np.searchsorted(self._starts, tokens, side="right") - 1
        per_block = np.array([r.block_bytes // r.dtype.itemsize for r in self._readers])
        block = (tokens - self._starts[shard]) // per_block[shard]
        return list(zip(shard.tolist(), block.tolist(), strict=True))

    def _fetch(self, key: Key) -> None:
        self._readers[key[0]].fetch_ahead(key[1])

    def _announced(self) -> set[str]:
        return {self._readers[shard].block_path(block) for shard, block in self.ahead.announced()}


class StreamedReader(IndexedReader):
    """One pair whose `.idx` is in the cache and whose `.bin` is in the store."""

    def __init__(self, prefix: Path, store: ObjectStore, cache: BlockCache, promised: Shard, block_bytes: int) -> None:
        self.block_bytes = block_bytes
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
            content = self._store.read(
                self._object, block * self.block_bytes, self._size_of(block), self._facts.version
            )
            self._look_again(self.block_path(block))
            if self._fault is not None:
                raise self._fault
            return content

        return self._cache.fill(self.block_path(block), self._size_of(block), fetch)

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


def open_streamed(
    url: str,
    cache: Path,
    cache_limit: int | None = None,
    *,
    store: ObjectStore | None = None,
    block_bytes: int | None = None,
    threads: int = 8,
) -> StreamedCorpus:
    """A corpus made by `argosy data prepare` and copied to `url`, read through the directory `cache`."""
    store = store or ObjectStore(url)
    content = store.read_small(FILE_NAME)
    blocks = BlockCache(cache, cache_limit, wait_s=store.patience_s)
    try:
        return _open(store, blocks, content, block_bytes, threads)
    except BaseException:
        store.close()
        blocks.close()
        raise


def _open(
    store: ObjectStore, blocks: BlockCache, content: bytes, block_bytes: int | None, threads: int
) -> StreamedCorpus:
    key = hashlib.sha256(store.url.encode() + b"\n" + content).hexdigest()[:32]
    directory = blocks.open_corpus(key)
    manifest = _keep_small(directory, store, blocks, content)
    sizes = _Sizes.of(manifest)
    block = block_bytes or sizes.block_for(blocks.limit)
    sizes.require_room(store.url, blocks.limit, block)

    def open_shard(promised: Shard) -> StreamedReader:
        index = directory / f"{promised.name}.idx"
        size = _index_bytes(promised)
        blocks.fill_file(index, promised.idx_sha256, lambda: store.chunks(index.name, size))
        reader = StreamedReader(directory / promised.name, store, blocks, promised, block)
        if (reader.tokens, reader.documents) != (promised.tokens, promised.documents):
            raise ArgosyError(
                "data.bad-manifest",
                f"{store.url}: the manifest promises {promised.documents:,} documents and {promised.tokens:,} tokens in "
                f"{promised.name}, its .idx lists {reader.documents:,} and {reader.tokens:,}",
                fix="upload the corpus again, or prepare it again",
            )
        return reader

    shards = _side_by_side(open_shard, manifest.shards, threads)
    blocks.trim()
    return StreamedCorpus(store.url, directory, shards, manifest, blocks, threads)


def _side_by_side(work: Callable[[Shard], StreamedReader], shards: list[Shard], threads: int) -> list[StreamedReader]:
    """In daemon threads, unlike a pool's: Ctrl-C must not wait for a store that does not answer."""
    done: dict[int, StreamedReader] = {}
    errors: list[Exception] = []
    numbers = iter(range(len(shards)))  # next() on it is one step under the GIL

    def run() -> None:
        for number in numbers:
            if errors:
                return
            try:
                done[number] = work(shards[number])
            except Exception as error:  # noqa: BLE001 - raised by the caller
                errors.append(error)

    running = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, len(shards)))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]
    return [done[number] for number in range(len(shards))]


def _keep_small(directory: Path, store: ObjectStore, cache: BlockCache, content: bytes) -> Manifest:
    """Manifest and tokenizer beside the `.idx` files, where a local corpus has them."""
    cache.keep_file(directory / FILE_NAME, content)
    manifest = read_manifest(directory)
    name = manifest.tokenizer.file
    size = store.facts(name).size
    if size is None:
        cache.keep_file(directory / name, store.read_small(name))
    else:  # through a sealed copy, so that each node fetches it once and a torn file is noticed
        sealed = f"{directory}/tokenizer-{size}.sealed"
        cache.keep_file(directory / name, cache.fill(sealed, size, lambda: b"".join(store.chunks(name, size))))
    return manifest


class _Sizes:
    """What a corpus needs of a cache."""

    def __init__(self, index_bytes: int, bin_bytes: int) -> None:
        self.index_bytes, self.bin_bytes = index_bytes, bin_bytes

    @classmethod
    def of(cls, manifest: Manifest) -> _Sizes:
        try:
            width = np.dtype(manifest.dtype).itemsize
        except TypeError:
            raise ArgosyError(
                "data.bad-manifest",
                f"its dtype {manifest.dtype!r} is not one of tokens",
                fix="prepare the corpus again",
            ) from None
        return cls(sum(_index_bytes(shard) for shard in manifest.shards), manifest.tokens * width)

    def block_for(self, limit: int | None) -> int:
        whole = self.index_bytes + self.bin_bytes + SEAL * (self.bin_bytes // BLOCK_WHOLE + 1)
        return BLOCK_WHOLE if limit is None or limit >= whole else BLOCK_PART

    def require_room(self, url: str, limit: int | None, block_bytes: int) -> None:
        least = self.index_bytes + LEAST_BLOCKS * (block_bytes + SEAL)
        if limit is not None and limit < least:
            raise ArgosyError(
                "config.arithmetic",
                f"{url} needs {self.index_bytes:,} bytes for its .idx files + {LEAST_BLOCKS} blocks x "
                f"{block_bytes + SEAL:,} bytes = {least:,} bytes of cache at least; the whole of it is "
                f"{self.index_bytes + self.bin_bytes:,}",
                key="data.train.cache_limit",
                value=limit,
                fix=f"cache_limit of {least:,} or more; the nearer to the whole, the less is fetched twice",
            )


def _index_bytes(shard: Shard) -> int:
    return HEADER.size + 12 * shard.sequences + 8 * (shard.documents + 1)

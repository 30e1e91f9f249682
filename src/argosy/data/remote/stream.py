"""A prepared corpus streamed from object storage through a local cache.

Why blocks and not shards: training reads windows of seq_len + 1 tokens (8 to 16 kB) in an order shuffled over the whole corpus,
so any batch touches shards everywhere. With whole shards the first batch would download the corpus, and a cache smaller than
the corpus would download a shard per sample. With blocks a sample costs at most one or two blocks, and on average
block x (1 - cache / corpus) bytes once the cache is warm:

    corpus 400 GB, cache 200 GB, 100 samples a second    whole 1 GB shards    50 GB/s
                                                         blocks of 1 MiB      52 MB/s
                                                         blocks of 256 KiB    13 MB/s

So blocks are small: 1 MiB if the whole corpus fits in the cache and each block is downloaded once, 256 KiB if it does not
(then larger blocks do not pay, although half of them are read again later). Neither the order nor the content of samples
depends on the block size. The known order hides the latency of the store: the loader announces the next reads to `prefetch`,
and a few threads download those blocks in the order in which training needs them.

Each `.idx` is checked against its sha256 in the manifest at each start, and each block as it arrives (shard_reader.py).
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from argosy.data.corpus.block_hashes import DIGEST, blocks_of, blocks_path
from argosy.data.corpus.corpus import Corpus
from argosy.data.corpus.corpus_manifest import FILE_NAME, Manifest, Shard, read_manifest
from argosy.data.corpus.indexed import HEADER
from argosy.data.remote.ahead import Key, ReadAhead
from argosy.data.remote.cache import CHECKSUM_BYTES, BlockCache
from argosy.data.remote.objects import ObjectStore
from argosy.data.remote.shard_reader import StreamedReader
from argosy.errors import ArgosyError

# The block size if the corpus fits in the cache, and if it does not.
BLOCK_WHOLE = 1 << 20  # bytes
BLOCK_PART = 1 << 18  # bytes
# The minimum number of blocks that a cache must hold.
LEAST_BLOCKS = 8


class StreamedCorpus(Corpus):
    """A corpus whose tokens are downloaded as they are read. `path` is the local directory with manifest and tokenizer."""

    is_remote = True

    def __init__(
        self, url: str, path: Path, shards: list[StreamedReader], manifest: Manifest, cache: BlockCache, threads: int
    ) -> None:
        super().__init__(path, list(shards), manifest)
        self.url = url
        self._readers, self._cache = shards, cache
        room = None
        # Half of the cache is for prefetched blocks, half for blocks that were read before.
        if cache.limit is not None:
            room = max(1, cache.limit // 2 // (shards[0].block_bytes + CHECKSUM_BYTES))
        self.ahead = ReadAhead(self._fetch, threads, room)
        cache.keep = self._announced
        for number, reader in enumerate(shards):
            reader.attach(number, self.ahead)

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Replace the prefetch queue by these token ranges (start, count), nearest first. Return at once.

        `read` works for any range, prefetched or not.
        """
        self.ahead.announce(self.blocks_of(ranges))

    def blocks_of(self, ranges: Sequence[tuple[int, int]]) -> list[Key]:
        """Return the blocks that reads of these ranges touch, each once, in the order of first use."""
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
        """Stop prefetching, and release the lock that marks the cached corpus as in use."""
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


def open_streamed(
    url: str,
    cache: Path,
    cache_limit: int | None = None,
    *,
    store: ObjectStore | None = None,
    block_bytes: int | None = None,
    threads: int = 8,
) -> StreamedCorpus:
    """Open a corpus that `argosy data prepare` made and that was copied to `url`.

    Args:
        url: The URL of the corpus directory.
        cache: The local cache directory, which processes may share.
        cache_limit: The size limit of the cache in bytes. None: no limit.
        store: The object store. None: one for `url`.
        block_bytes: The block size. None: chosen by the size of corpus and cache.
        threads: The number of download threads.
    """
    store = store or ObjectStore(url)
    content = store.read_small(FILE_NAME)
    blocks = BlockCache(cache, cache_limit, wait_s=store.retry_timeout_s)
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
        reader = StreamedReader(
            directory / promised.name,
            store,
            blocks,
            promised,
            block,
            _digests(directory, store, blocks, promised, sizes.width),
        )
        if (reader.tokens, reader.documents) != (promised.tokens, promised.documents):
            raise ArgosyError(
                "data.bad-manifest",
                f"{store.url}: the manifest promises {promised.documents:,} documents and {promised.tokens:,} tokens in "
                f"{promised.name}, its .idx lists {reader.documents:,} and {reader.tokens:,}",
                fix="upload the corpus again, or prepare it again",
            )
        return reader

    shards = _in_threads(open_shard, manifest.shards, threads)
    blocks.trim()
    return StreamedCorpus(store.url, directory, shards, manifest, blocks, threads)


def _digests(directory: Path, store: ObjectStore, blocks: BlockCache, promised: Shard, width: int) -> mmap.mmap | None:
    """Return the memory-mapped block hashes of a shard, or None if the corpus has none."""
    if promised.blocks_sha256 is None:
        return None
    path = blocks_path(directory / promised.name)
    size = _digest_bytes(promised, width)
    blocks.fill_file(path, promised.blocks_sha256, lambda: store.chunks(path.name, size))
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _in_threads(work: Callable[[Shard], StreamedReader], shards: list[Shard], threads: int) -> list[StreamedReader]:
    """Map `work` over the shards in daemon threads. With those of a ThreadPoolExecutor, Ctrl-C would wait for a hung store."""
    done: dict[int, StreamedReader] = {}
    errors: list[Exception] = []
    # `next` on this iterator is atomic under the GIL.
    numbers = iter(range(len(shards)))

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
    """Store manifest, tokenizer and chat template beside the `.idx` files, as in a local corpus. Return the manifest."""
    cache.keep_file(directory / FILE_NAME, content)
    manifest = read_manifest(directory)
    if manifest.chat is not None:
        cache.keep_file(directory / manifest.chat.file, store.read_small(manifest.chat.file))
    name = manifest.tokenizer.file
    size = store.facts(name).size
    if size is None:
        cache.keep_file(directory / name, store.read_small(name))
    else:
        # Use a cache entry with a checksum, so that each node downloads it once and a torn file is detected.
        sealed = f"{directory}/tokenizer-{size}.sealed"
        cache.keep_file(directory / name, cache.fill(sealed, size, lambda: b"".join(store.chunks(name, size))))
    return manifest


class _Sizes:
    """The cache sizes that a corpus needs."""

    def __init__(self, index_bytes: int, bin_bytes: int, width: int, shards: int) -> None:
        self.index_bytes, self.bin_bytes, self.width, self.shards = index_bytes, bin_bytes, width, shards

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
        index_bytes = sum(_index_bytes(shard) + _digest_bytes(shard, width) for shard in manifest.shards)
        return cls(index_bytes, manifest.tokens * width, width, len(manifest.shards))

    def whole(self, block_bytes: int) -> int:
        """Return the cache size in bytes for the whole corpus."""
        return self.index_bytes + self.bin_bytes + CHECKSUM_BYTES * (self.bin_bytes // block_bytes + self.shards)

    def block_for(self, limit: int | None) -> int:
        return BLOCK_WHOLE if limit is None or limit >= self.whole(BLOCK_WHOLE) else BLOCK_PART

    def require_room(self, url: str, limit: int | None, block_bytes: int) -> None:
        few, whole = self.index_bytes + LEAST_BLOCKS * (block_bytes + CHECKSUM_BYTES), self.whole(block_bytes)
        if limit is not None and limit < min(few, whole):
            raise ArgosyError(
                "config.arithmetic",
                f"{url} needs {self.index_bytes:,} bytes for its .idx and .blocks files + {LEAST_BLOCKS} blocks x "
                f"{block_bytes + CHECKSUM_BYTES:,} bytes = {few:,} bytes of cache at least, or {whole:,} for the whole of it",
                key="data.train.cache_limit",
                value=limit,
                fix=f"cache_limit of {min(few, whole):,} or more; the nearer to the whole, the less is fetched twice",
            )


def _index_bytes(shard: Shard) -> int:
    return HEADER.size + 12 * shard.sequences + 8 * (shard.documents + 1)


def _digest_bytes(shard: Shard, width: int) -> int:
    """Return the size of the `.blocks` file of a shard. `width` is the bytes per token."""
    if shard.blocks_sha256 is None:
        return 0
    return DIGEST * (blocks_of(shard.tokens * width) + blocks_of(_index_bytes(shard)))

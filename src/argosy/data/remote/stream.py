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

Each `.idx` is checked against its sha256 in the manifest at each start, each block as it arrives (reader.py).
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
from argosy.data.remote.cache import SEAL, BlockCache
from argosy.data.remote.objects import ObjectStore
from argosy.data.remote.shard_reader import StreamedReader
from argosy.errors import ArgosyError

BLOCK_WHOLE = 1 << 20  # bytes of a block where the corpus fits in the cache
BLOCK_PART = 1 << 18  # and where it does not
LEAST_BLOCKS = 8  # a cache must hold


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

    shards = _side_by_side(open_shard, manifest.shards, threads)
    blocks.trim()
    return StreamedCorpus(store.url, directory, shards, manifest, blocks, threads)


def _digests(directory: Path, store: ObjectStore, blocks: BlockCache, promised: Shard, width: int) -> mmap.mmap | None:
    """The hashes of the blocks of a shard, where the corpus has them."""
    if promised.blocks_sha256 is None:
        return None
    path = blocks_path(directory / promised.name)
    size = _digest_bytes(promised, width)
    blocks.fill_file(path, promised.blocks_sha256, lambda: store.chunks(path.name, size))
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


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
        """All of it in a cache."""
        return self.index_bytes + self.bin_bytes + SEAL * (self.bin_bytes // block_bytes + self.shards)

    def block_for(self, limit: int | None) -> int:
        return BLOCK_WHOLE if limit is None or limit >= self.whole(BLOCK_WHOLE) else BLOCK_PART

    def require_room(self, url: str, limit: int | None, block_bytes: int) -> None:
        few, whole = self.index_bytes + LEAST_BLOCKS * (block_bytes + SEAL), self.whole(block_bytes)
        if limit is not None and limit < min(few, whole):
            raise ArgosyError(
                "config.arithmetic",
                f"{url} needs {self.index_bytes:,} bytes for its .idx and .blocks files + {LEAST_BLOCKS} blocks x "
                f"{block_bytes + SEAL:,} bytes = {few:,} bytes of cache at least, or {whole:,} for the whole of it",
                key="data.train.cache_limit",
                value=limit,
                fix=f"cache_limit of {min(few, whole):,} or more; the nearer to the whole, the less is fetched twice",
            )


def _index_bytes(shard: Shard) -> int:
    return HEADER.size + 12 * shard.sequences + 8 * (shard.documents + 1)


def _digest_bytes(shard: Shard, width: int) -> int:
    """Of the hashes of its blocks; `width`: bytes of a token."""
    if shard.blocks_sha256 is None:
        return 0
    return DIGEST * (blocks_of(shard.tokens * width) + blocks_of(_index_bytes(shard)))

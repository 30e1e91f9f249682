"""A corpus in object storage gives the same samples as on disk, through a cache that is shared, small, killed or corrupted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy.config.batches import Batches
from argosy.data.corpus.corpus import open_corpus
from argosy.data.loader import Loader
from argosy.data.remote import cache as cache_module
from argosy.data.remote import shard_reader as reader_module
from argosy.data.remote.ahead import ReadAhead
from argosy.data.remote.cache import CHECKSUM_BYTES, BlockCache
from argosy.data.remote.shared_files import unlink
from argosy.data.remote.stream import BLOCK_PART, BLOCK_WHOLE, open_streamed
from argosy.errors import ArgosyError
from forking import Popen
from ports import free_port
from waiting import PATIENCE_S, wait_for

sys.path.insert(0, str(Path(__file__).parent))
from corpora import write_corpus
from object_server import (
    FAULTS,
    FaultyServer,
    azure_connection,
    azurite,
    from_directory,
    from_upstream,
    moto,
    no_proxy,
    upload,
)
from stream_reader import BLOCK, batches, patient, samples

pytest.importorskip("aiohttp", reason="pip install 'argosy[remote]'")

SHARDS = 3
INDEX_BYTES = SHARDS * (34 + 12 * 40 + 8 * 41)
# Room for 12 of about 60 blocks.
SMALL = INDEX_BYTES + 12 * (BLOCK + CHECKSUM_BYTES)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three shards of 40 documents, about 80 kB each, of random tokens."""
    rng = np.random.default_rng(5)

    def document() -> list[list[int]]:
        return [rng.integers(0, 256, int(rng.integers(800, 1200))).tolist()]

    return write_corpus(
        tmp_path_factory.mktemp("store") / "corpus", [[document() for _ in range(40)] for _ in range(SHARDS)]
    )


@pytest.fixture
def server(local: Path) -> Iterator[FaultyServer]:
    server = FaultyServer(from_directory(local.parent))
    yield server
    server.close()


def block_files(cache: Path) -> list[Path]:
    return sorted(p for p in cache.glob("argosy-*/blocks/*/*") if p.name.isdigit())


def bytes_in(cache: Path) -> int:
    """Return the bytes in the cache, under the lock that prefetch threads hold while they write and evict."""
    held = 0
    with (cache / "argosy-usage").open("ab") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        for path in (*cache.glob("argosy-*/*.idx"), *cache.glob("argosy-*/blocks/*/*")):
            # A partial file that was abandoned.
            with contextlib.suppress(FileNotFoundError):
                held += path.stat().st_size
    return held


def refusal_of(action: Callable[[], Any]) -> ArgosyError:
    with pytest.raises(ArgosyError) as refusal:
        action()
    return refusal.value


# The same samples, wherever the corpus is stored.


@pytest.mark.parametrize("limit", [None, SMALL])
@pytest.mark.parametrize("announce", [0, 80])
def test_batches_are_those_of_the_local_corpus(
    local: Path, server: FaultyServer, tmp_path: Path, limit: int | None, announce: int
) -> None:
    corpus = open_streamed(f"{server.url}/corpus", tmp_path / "cache", limit, block_bytes=BLOCK)
    assert batches(corpus, announce=announce) == batches(open_corpus(local))
    assert corpus.facts() == open_corpus(local).facts()
    assert corpus.max_token() == open_corpus(local).max_token()
    if limit is not None:
        assert bytes_in(tmp_path / "cache") <= limit
    elif not announce:
        assert max(server.gets.values()) == 1
    corpus.close()


def test_reads_of_any_range_are_those_of_the_local_corpus(local: Path, tmp_path: Path) -> None:
    corpus, whole = open_streamed(f"file://{local}", tmp_path / "cache", block_bytes=512), open_corpus(local)
    rng = np.random.default_rng(1)
    for _ in range(300):
        start = int(rng.integers(0, whole.tokens))
        count = int(rng.integers(1, min(3000, whole.tokens - start) + 1))
        assert np.array_equal(corpus.read(start, count), whole.read(start, count))
    assert np.array_equal(corpus.read(0, corpus.tokens), whole.read(0, whole.tokens))
    assert np.array_equal(corpus.shards[1].sequence(3), whole.shards[1].sequence(3))
    corpus.close()


def test_a_corpus_in_memory_storage_is_read(local: Path, tmp_path: Path) -> None:
    import fsspec

    upload(fsspec.filesystem("memory"), local, "/streamed")
    corpus = open_streamed("memory://streamed", tmp_path / "cache", block_bytes=BLOCK)
    assert batches(corpus) == batches(open_corpus(local))
    corpus.close()


def test_the_loader_reads_a_streamed_corpus(local: Path, server: FaultyServer, tmp_path: Path) -> None:
    corpus = open_streamed(f"{server.url}/corpus", tmp_path / "cache", SMALL, block_bytes=BLOCK)
    with Loader(samples(corpus), batches=Batches(8), consumed_samples=16) as loader:
        for step in range(2, 12):
            assert np.array_equal(loader.next_batch().tokens, samples(open_corpus(local)).batch(8 * step, 8).tokens)
    corpus.close()


def test_s3_with_faults_gives_the_local_batches(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs = pytest.importorskip("s3fs", reason="pip install s3fs")
    pytest.importorskip("moto", reason="pip install 'moto[server]'")
    for key, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(key, value)
    with moto(tmp_path) as port:
        direct = s3fs.S3FileSystem(endpoint_url=f"http://127.0.0.1:{port}", skip_instance_cache=True)
        direct.mkdir("bucket")
        upload(direct, local, "bucket/corpus")
        proxy = FaultyServer(from_upstream(port))
        proxy.at_random(0.2)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        corpus = open_streamed(
            "s3://bucket/corpus/", tmp_path / "cache", SMALL, block_bytes=BLOCK, store=patient("s3://bucket/corpus/")
        )
        assert batches(corpus, 60, announce=60) == batches(open_corpus(local), 60)
        assert bytes_in(tmp_path / "cache") <= SMALL
        assert len(proxy.faults) > 2
        corpus.close()
        proxy.fault = lambda path: None
        missing = refusal_of(lambda: open_streamed("s3://bucket/nothing", tmp_path / "cache"))
        assert missing.code == "data.not-found"
        assert "s3://bucket/nothing/manifest.json" in missing.cause
        changed = open_streamed("s3://bucket/corpus", tmp_path / "other", block_bytes=BLOCK)
        monkeypatch.setattr(reader_module, "RECHECK_S", 0.0)
        direct.pipe_file("bucket/corpus/shard-00001.bin", (local / "shard-00001.bin").read_bytes()[::-1])
        assert "was replaced while in use" in refusal_of(lambda: batches(changed)).cause
        changed.close()
        proxy.close()


def test_azure_with_faults_gives_the_local_batches(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adlfs = pytest.importorskip("adlfs", reason="pip install adlfs")
    if shutil.which("azurite-blob") is None:
        pytest.skip("azurite is not installed: npm install -g azurite")
    with azurite(tmp_path) as port:
        direct = adlfs.AzureBlobFileSystem(connection_string=azure_connection(port), skip_instance_cache=True)
        direct.mkdir("container")
        upload(direct, local, "container/corpus")
        proxy = FaultyServer(from_upstream(port))
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure_connection(int(proxy.url.rpartition(":")[2])))
        store = patient("az://container/corpus")
        corpus = open_streamed(store.url, tmp_path / "cache", SMALL, block_bytes=BLOCK, store=store)
        proxy.at_random(0.15, seed=3)
        assert batches(corpus, 60, announce=60) == batches(open_corpus(local), 60)
        assert len(proxy.faults) > 2
        assert bytes_in(tmp_path / "cache") <= SMALL
        corpus.close()
        proxy.close()


# Faults of the store.


def test_every_kind_of_fault_is_ridden_out(local: Path, server: FaultyServer, tmp_path: Path) -> None:
    server.at_random(0.3, seed=2)
    store = patient(f"{server.url}/corpus")
    corpus = open_streamed(store.url, tmp_path / "cache", block_bytes=BLOCK, store=store)
    assert batches(corpus, announce=200) == batches(open_corpus(local))
    assert set(server.faults) == set(FAULTS)
    assert max(server.gets.values()) == 1
    corpus.close()


def test_retry_after_is_honoured(server: FaultyServer) -> None:
    store, server.retry_after = patient(f"{server.url}/corpus"), "1"
    answers = iter(["429"])
    server.fault = lambda path: next(answers, None)
    server.times.clear()
    store.read("shard-00000.bin", 0, 100)
    assert len(server.times) == 2
    assert server.times[1] - server.times[0] >= 1.0


@pytest.mark.parametrize("fault", ["500", "hang", "truncate", "short", "long", "reset", "429"])
def test_patience_ends_with_the_object_and_the_last_error(server: FaultyServer, fault: str) -> None:
    store = patient(f"{server.url}/corpus", retry_timeout_s=0.5, attempt_s=0.3)
    server.fault = lambda path: fault
    began = time.monotonic()
    refusal = refusal_of(lambda: store.read("shard-00000.bin", 0, 100))
    # The default retry timeout is many times that.
    assert time.monotonic() - began < 30
    assert refusal.code == "data.fetch-failed"
    assert f"{server.url}/corpus/shard-00000.bin" in refusal.cause
    assert "the last error was: " in refusal.cause


@pytest.mark.parametrize(("status", "code"), [("403", "data.fetch-failed"), ("401", "data.fetch-failed")])
def test_rejected_credentials_are_refused_at_once(server: FaultyServer, status: str, code: str) -> None:
    server.fault = lambda path: status
    refusal = refusal_of(lambda: patient(f"{server.url}/corpus").read("shard-00000.bin", 0, 100))
    assert refusal.code == code
    assert status in refusal.cause
    assert server.faults[status] == 1


def test_a_missing_corpus_is_refused_at_once(server: FaultyServer, tmp_path: Path) -> None:
    for url in (f"{server.url}/nothing", f"file://{tmp_path}/nothing", "memory://nothing-there"):
        refusal = refusal_of(lambda url=url: open_streamed(url, tmp_path / "cache"))  # type: ignore[misc]
        assert refusal.code == "data.not-found"
        assert url in refusal.cause


def test_missing_s3_credentials_are_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("s3fs", reason="pip install s3fs")
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    began = time.monotonic()
    refusal = refusal_of(lambda: open_streamed("s3://bucket/corpus", tmp_path / "cache"))
    assert refusal.code == "data.fetch-failed"
    assert "credentials" in refusal.fix
    # The default retry timeout is many times that.
    assert time.monotonic() - began < 60


def test_an_object_replaced_while_in_use_is_refused(local: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(local, tmp_path / "store" / "corpus")
    server = FaultyServer(from_directory(tmp_path / "store"))
    corpus = open_streamed(f"{server.url}/corpus", tmp_path / "cache", block_bytes=BLOCK)
    corpus.read(0, 10)
    (copy / "shard-00000.bin").write_bytes((copy / "shard-00000.bin").read_bytes()[::-1])
    # Already cached.
    assert corpus.read(0, 10) is not None
    refusal = refusal_of(lambda: corpus.read(BLOCK, 10))
    assert refusal.code == "data.corrupt"
    assert "replaced" in refusal.cause
    corpus.close()
    server.close()


def test_a_spoilt_index_or_size_is_refused(local: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(local, tmp_path / "corpus")
    index = (copy / "shard-00001.idx").read_bytes()
    (copy / "shard-00001.idx").write_bytes(index[:-1] + b"\x01")
    refusal = refusal_of(lambda: open_streamed(f"file://{copy}", tmp_path / "cache"))
    assert refusal.code == "data.corrupt"
    assert "shard-00001.idx" in refusal.cause
    (copy / "shard-00001.idx").write_bytes(index)
    with (copy / "shard-00002.bin").open("ab") as file:
        file.write(b"xx")
    assert "shard-00002.bin has" in refusal_of(lambda: open_streamed(f"file://{copy}", tmp_path / "cache")).cause


def test_a_shard_that_is_not_what_its_manifest_says_is_found_out(local: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(local, tmp_path / "corpus")
    content = bytearray((copy / "shard-00000.bin").read_bytes())
    content[5000] ^= 1
    (copy / "shard-00000.bin").write_bytes(content)
    corpus = open_streamed(f"file://{copy}", tmp_path / "cache", block_bytes=BLOCK)
    corpus.read(0, corpus.shards[0].tokens)

    refusal = refusal_of(lambda: wait_for(lambda: corpus.read(0, 1) is None))
    assert refusal.code == "data.corrupt"
    assert "shard-00000.bin as stored has sha256" in refusal.cause
    wait_for(lambda: not block_files(tmp_path / "cache"))
    corpus.close()


def test_a_whole_shard_is_checked_once_for_each_cache(local: Path, tmp_path: Path) -> None:
    for _ in range(2):
        corpus = open_streamed(f"file://{local}", tmp_path / "cache", block_bytes=BLOCK)
        corpus.read(0, corpus.tokens)
        wait_for(lambda: len(list(tmp_path.glob("cache/argosy-*/blocks/*/whole"))) == SHARDS)
        corpus.close()
    seals = [p.read_bytes()[:CHECKSUM_BYTES].hex() for p in sorted(tmp_path.glob("cache/argosy-*/blocks/*/whole"))]
    assert corpus.manifest is not None
    assert seals == [shard.bin_sha256 for shard in corpus.manifest.shards]


# Prefetching.


def test_announced_blocks_are_fetched_in_the_order_of_need(local: Path, server: FaultyServer, tmp_path: Path) -> None:
    corpus = open_streamed(f"{server.url}/corpus", tmp_path / "cache", block_bytes=BLOCK, threads=1)
    server.gets.clear()
    rng = np.random.default_rng(0)
    ranges = [(int(start), 65) for start in rng.integers(0, corpus.tokens - 65, 40)]
    corpus.prefetch(ranges)
    wanted = corpus.blocks_of(ranges)
    wait_for(lambda: sum(server.gets.values()) == len(wanted))
    asked = [(path[-5], int(asked[6:].partition("-")[0]) // BLOCK) for path, asked in server.gets]
    assert asked == [(str(path), block) for path, block in _named(wanted)]
    # No block is downloaded again when it is read.
    for start, count in ranges:
        assert np.array_equal(corpus.read(start, count), open_corpus(local).read(start, count))
    assert max(server.gets.values()) == 1
    assert sum(server.gets.values()) == len(wanted)
    corpus.close()


def _named(keys: list[tuple[int, int]]) -> list[tuple[str, int]]:
    return [(f"shard-{shard:05d}.bin"[-5], block) for shard, block in keys]


def test_no_more_is_fetched_ahead_than_there_is_room_for(server: FaultyServer, tmp_path: Path) -> None:
    corpus = open_streamed(f"{server.url}/corpus", tmp_path / "cache", SMALL, block_bytes=BLOCK)
    corpus.prefetch([(0, corpus.tokens)])
    room = SMALL // 2 // (BLOCK + CHECKSUM_BYTES)
    wait_for(lambda: len(block_files(tmp_path / "cache")) == room)
    # Time for surplus downloads, which must not happen.
    time.sleep(0.2)
    assert len(block_files(tmp_path / "cache")) == room
    corpus.prefetch([])
    corpus.close()


def test_what_went_wrong_ahead_is_raised_where_the_block_is_read() -> None:
    def fetch(key: tuple[int, int]) -> None:
        if key == (0, 1):
            raise ArgosyError("data.fetch-failed", "no", fix="no")

    ahead = ReadAhead(fetch, 2, None)
    ahead.announce([(0, 0), (0, 1), (0, 2)])
    wait_for(lambda: len(ahead.announced()) == 3)
    ahead.take((0, 0))
    assert refusal_of(lambda: ahead.take((0, 1))).code == "data.fetch-failed"
    ahead.take((0, 2))
    ahead.close()


# The cache: limits, other processes, kills, corrupt files.


def test_a_limit_of_less_than_a_few_blocks_is_refused_with_its_arithmetic(local: Path, tmp_path: Path) -> None:
    refusal = refusal_of(lambda: open_streamed(f"file://{local}", tmp_path / "cache", 100_000))
    assert refusal.code == "config.arithmetic"
    assert (
        f"{INDEX_BYTES:,} bytes for its .idx and .blocks files + 8 blocks x {BLOCK_PART + CHECKSUM_BYTES:,}"
        in refusal.cause
    )


def test_a_limit_that_holds_the_whole_corpus_is_enough_however_small(local: Path, tmp_path: Path) -> None:
    whole = INDEX_BYTES + open_corpus(local).tokens * 2 + SHARDS * CHECKSUM_BYTES
    refusal = refusal_of(lambda: open_streamed(f"file://{local}", tmp_path / "cache", whole - 1))
    assert refusal.fix.startswith(f"cache_limit of {whole:,} or more")
    corpus = open_streamed(f"file://{local}", tmp_path / "cache", whole)
    assert batches(corpus) == batches(open_corpus(local))
    corpus.close()


def test_blocks_are_larger_where_the_whole_corpus_fits(local: Path, tmp_path: Path) -> None:
    for limit, block in ((None, BLOCK_WHOLE), (10**7, BLOCK_WHOLE)):
        corpus = open_streamed(f"file://{local}", tmp_path / "cache", limit)
        assert {reader.block_bytes for reader in corpus._readers} == {block}
        corpus.close()


def test_the_blocks_used_longest_ago_make_room(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 10 * (100 + CHECKSUM_BYTES))
    corpus = cache.open_corpus("0" * 32)
    paths = [f"{corpus}/blocks/a-{'0' * 16}-100/{i:08d}" for i in range(14)]
    for i, path in enumerate(paths[:10]):
        cache.fill(path, 100, lambda i=i: bytes([i]) * 100)  # type: ignore[misc]
        os.utime(path, ns=(10**9 * i, os.stat(path).st_mtime_ns))
    # Used most recently.
    cache.load(paths[0], 100, 0, 1)
    cache.fill(paths[10], 100, lambda: bytes(100))
    left = {int(p.name) for p in block_files(tmp_path)}
    assert {0, 10} <= left
    assert 1 not in left
    assert bytes_in(tmp_path) <= cache.limit  # type: ignore[operator]


def test_a_new_limit_holds_for_what_is_already_there(local: Path, tmp_path: Path) -> None:
    for limit in (None, SMALL):
        corpus = open_streamed(f"file://{local}", tmp_path, limit, block_bytes=BLOCK)
        corpus.read(0, corpus.tokens)
        assert (bytes_in(tmp_path) <= SMALL) == (limit is not None)
        corpus.close()


def test_foreign_files_are_left_alone(local: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    corpus = open_streamed(f"file://{local}", cache, SMALL, block_bytes=BLOCK)
    blocks = Path(corpus._readers[0]._directory)
    blocks.mkdir(parents=True, exist_ok=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    # A cache that follows links would train on this.
    sealed = bytes(BLOCK) + hashlib.sha256(bytes(BLOCK)).digest()
    (outside / "00000000").write_bytes(sealed)
    foreign = [cache / "notes.txt", cache / "argosy-mine", blocks / "00000001.bak", corpus.path / "blocks" / "README"]
    for file in foreign:
        file.write_bytes(b"the only copy" * 1000)
    (corpus.path / "blocks" / f"x-{'0' * 16}-4096").symlink_to(outside)
    (blocks / "00000003").symlink_to(outside / "00000000")
    assert batches(corpus, announce=60) == batches(open_corpus(local))
    assert all(file.read_bytes() == b"the only copy" * 1000 for file in foreign)
    assert (outside / "00000000").read_bytes() == sealed
    corpus.close()


def test_a_cache_in_the_corpus_itself_does_not_eat_it(local: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(local, tmp_path / "corpus")
    before = {p.name: p.read_bytes() for p in copy.iterdir()}
    corpus = open_streamed(f"file://{copy}", copy, SMALL, block_bytes=BLOCK)
    assert batches(corpus) == batches(open_corpus(local))
    assert {p.name: p.read_bytes() for p in copy.iterdir() if p.name in before} == before
    corpus.close()


def test_spoilt_cache_files_are_fetched_again(local: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    expected = batches(open_corpus(local))
    corpus = open_streamed(f"file://{local}", cache, block_bytes=BLOCK)
    batches(corpus)
    corpus.close()
    rng = random.Random(4)
    for file in block_files(cache):
        content = bytearray(file.read_bytes())
        how = rng.choice(["flip", "cut", "empty", "zero", "grow", "keep", "partial"])
        if how == "flip":
            content[rng.randrange(len(content))] ^= 0x40
        elif how == "partial":
            Path(f"{file}.partial").write_bytes(content[:100])
        file.write_bytes(
            {"cut": content[:-1], "empty": b"", "zero": bytes(len(content)), "grow": content + b"x"}.get(how, content)
        )
    for index in cache.glob("argosy-*/*.idx"):
        index.write_bytes(index.read_bytes()[:-4])
    (cache / "argosy-usage").write_bytes(rng.randbytes(50))
    for name in ("manifest.json", "*.sealed", "tokenizer*"):
        for file in cache.glob(f"argosy-*/{name}"):
            file.write_bytes(b"{")
    corpus = open_streamed(f"file://{local}", cache, block_bytes=BLOCK)
    assert batches(corpus) == expected
    assert corpus.manifest is not None
    stored = corpus.manifest.tokenizer.file
    assert (corpus.path / stored).read_bytes() == (local / stored).read_bytes()
    corpus.close()


def test_a_count_that_lies_does_not_break_the_limit(local: Path, tmp_path: Path) -> None:
    for lie in ("0\n", f"0 {int(time.time()) + 10**6}\n", f"99999999999999 {int(time.time())}\n", "-5\n", ""):
        corpus = open_streamed(f"file://{local}", tmp_path, SMALL, block_bytes=BLOCK)
        (tmp_path / "argosy-usage").write_text(lie)
        assert batches(corpus, 100) == batches(open_corpus(local), 100)
        assert bytes_in(tmp_path) <= SMALL
        corpus.close()


def test_a_cache_that_cannot_be_written_is_refused(local: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    refusal = refusal_of(lambda: open_streamed(f"file://{local}", tmp_path / "file"))
    assert refusal.code == "data.write-failed"
    assert str(tmp_path / "file") in refusal.cause


def test_an_emptied_cache_fills_again(local: Path, tmp_path: Path) -> None:
    corpus = open_streamed(f"file://{local}", tmp_path / "cache", block_bytes=BLOCK)
    batches(corpus, 100)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    assert batches(corpus) == batches(open_corpus(local))
    corpus.close()


def test_a_stopped_process_that_holds_a_lock_holds_nobody_up(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, None, wait_s=0.2)
    path = f"{cache.open_corpus('0' * 32)}/blocks/a-{'0' * 16}-4/00000000"
    os.makedirs(os.path.dirname(path))
    with open(f"{path}.partial", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cache.fill(path, 4, lambda: b"abcd") == b"abcd"
        assert not os.path.exists(path)
    assert cache.fill(path, 4, lambda: b"abcd") == b"abcd"
    assert os.path.exists(path)


class Clock:
    """A clock that advances only when somebody sleeps."""

    now = 0.0
    time, time_ns = time.time, time.time_ns

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_process_that_hangs_with_the_books_in_hand_costs_one_wait_not_one_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(cache_module, "time", clock)
    cache = BlockCache(tmp_path, None)
    blocks = f"{cache.open_corpus('0' * 32)}/blocks/a-{'0' * 16}-4"
    with open(tmp_path / "argosy-usage", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache.fill(f"{blocks}/00000000", 4, lambda: b"abcd")
        assert clock.now > 0
        began = clock.now
        for number in range(1, 20):
            assert cache.fill(f"{blocks}/{number:08d}", 4, lambda: b"abcd") == b"abcd"
        assert clock.now == began
    cache.fill(f"{blocks}/00000000", 4, lambda: b"abcd")
    assert os.listdir(blocks) == ["00000000"]


def test_a_disk_that_others_have_filled_costs_the_cache_not_the_run(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = open_streamed(f"file://{local}", tmp_path / "cache", block_bytes=BLOCK)

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert batches(corpus) == batches(open_corpus(local))
        assert not block_files(tmp_path / "cache")
    assert batches(corpus) == batches(open_corpus(local))
    assert block_files(tmp_path / "cache")
    corpus.close()


def test_what_an_open_corpus_keeps_is_not_evicted_from_under_it(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, None)
    index = cache.open_corpus("0" * 32) / "a.idx"
    index.write_bytes(b"x")
    # It was idle a moment ago.
    assert not unlink(str(index), str(index.parent / "in-use"))
    cache.close()
    assert unlink(str(index), str(index.parent / "in-use"))


def test_threads_of_one_process_fetch_each_block_once(server: FaultyServer, local: Path, tmp_path: Path) -> None:
    corpus = open_streamed(f"{server.url}/corpus", tmp_path / "cache", block_bytes=BLOCK)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(batches(corpus, 200))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [batches(open_corpus(local), 200)] * 4
    assert max(server.gets.values()) == 1
    corpus.close()


def start_reader(url: str, cache: Path, limit: int | None, count: int = 200) -> subprocess.Popen[str]:
    program = Path(__file__).with_name("stream_reader.py")
    return Popen(
        [sys.executable, str(program), url, str(cache), json.dumps(limit), str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env=no_proxy(),
    )


def times_served(server: FaultyServer) -> Counter[tuple[str, int]]:
    """Return how often each block of a shard's tokens, and the first byte of its index, was sent."""
    served: Counter[tuple[str, int]] = Counter()
    for (path, asked), count in server.gets.items():
        if path.endswith((".bin", ".idx")):
            bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
            first, last = (int(bounds[1]), int(bounds[2])) if bounds else (0, 0)
            for block in range(first // BLOCK, last // BLOCK + 1):
                served[path, block] += count
    return served


@pytest.mark.parametrize("limit", [None, SMALL])
def test_processes_share_a_cache(local: Path, server: FaultyServer, tmp_path: Path, limit: int | None) -> None:
    readers = [
        start_reader(f"{server.url}/corpus", tmp_path / "cache", limit) for _ in range(3 if limit is None else 2)
    ]
    expected = batches(open_corpus(local))
    for reader in readers:
        assert reader.communicate(timeout=PATIENCE_S)[0].split() == ["open", expected]
    if limit is None:
        assert max(times_served(server).values()) == 1, "a process fetched what another had fetched"
    assert limit is None or bytes_in(tmp_path / "cache") <= limit


def kill_at_random(local: Path, server: FaultyServer, cache: Path, kills: int, seed: int) -> None:
    """Kill readers at random moments, with and without a limit, sometimes in pairs; then run one undisturbed."""
    rng, url = random.Random(seed), f"{server.url}/corpus"
    answer = server.answer

    def slowly(*arguments: Any) -> Any:
        # Time for some work, so that a kill interrupts something.
        time.sleep(0.004)
        return answer(*arguments)

    server.answer = slowly
    for number in range(kills):
        readers = [start_reader(url, cache, rng.choice([None, SMALL])) for _ in range(1 + number % 2)]
        if rng.random() < 0.8:
            assert readers[0].stdout is not None
            readers[0].stdout.readline()
        time.sleep(rng.uniform(0, 0.3))
        for reader in readers:
            reader.kill()
            reader.communicate()
    server.answer = answer
    last = start_reader(url, cache, SMALL)
    assert last.communicate(timeout=PATIENCE_S)[0].split() == ["open", batches(open_corpus(local))]
    assert bytes_in(cache) <= SMALL
    with contextlib.closing(open_streamed(url, cache, block_bytes=BLOCK)) as corpus:
        assert np.array_equal(corpus.read(0, corpus.tokens), open_corpus(local).read(0, corpus.tokens))


def test_a_reader_killed_at_any_moment_leaves_a_sound_cache(local: Path, server: FaultyServer, tmp_path: Path) -> None:
    kill_at_random(local, server, tmp_path / "cache", kills=2, seed=1)


def test_a_kill_between_two_changes_of_the_cache_keeps_its_limit(tmp_path: Path) -> None:
    program = Path(__file__).with_name("killed_filler.py")
    ended = subprocess.run([sys.executable, str(program), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert ended.returncode == 0
    # It died at so many moments, without and with a limit of its own.
    assert [int(moments) > 5 for moments in ended.stdout.split()] == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_kills_leave_a_sound_cache(local: Path, server: FaultyServer, tmp_path: Path) -> None:
    kill_at_random(local, server, tmp_path / "cache", kills=50, seed=2)


def test_ctrl_c_ends_a_reader_at_once_although_the_store_hangs(server: FaultyServer, tmp_path: Path) -> None:
    answer, hung = server.answer, []

    def hang(method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        if method == "GET" and path.endswith(".bin"):
            hung.append(path)
            time.sleep(600)
        return answer(method, path, headers, body)

    server.answer = hang
    reader = start_reader(f"{server.url}/corpus", tmp_path / "cache", None)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "open\n"
    wait_for(lambda: hung)
    reader.send_signal(signal.SIGINT)
    assert reader.communicate(timeout=PATIENCE_S)[0] == ""

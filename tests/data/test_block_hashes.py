"""Block hashes: `prepare` writes them, `verify` names a damaged block, `merge` keeps them, streaming checks them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from corpora import write_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from object_server import Answer, FaultyServer, from_directory
from stream_reader import patient

from argosy.data.corpus.block_hashes import BLOCK, DIGEST, BlockHasher, blocks_of, wrong_blocks
from argosy.data.corpus.corpus import open_corpus
from argosy.data.corpus.corpus_manifest import read_manifest
from argosy.data.corpus.merge import merge
from argosy.data.corpus.verify import verify
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.remote.stream import open_streamed
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.errors import ArgosyError

pytest.importorskip("aiohttp", reason="pip install 'argosy[remote]'")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two shards of a little over 2 MB and one without documents, with the hashes of their blocks."""
    rng = np.random.default_rng(5)
    shards = [[[rng.integers(0, 256, 120_000).tolist()] for _ in range(9)] for _ in range(2)]
    return write_corpus(tmp_path_factory.mktemp("store") / "corpus", [*shards, []], blocks=True)


@pytest.fixture
def copy(local: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(local, tmp_path / "store" / "corpus"))


def spoil(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(0, 3 * BLOCK + 5),
    cuts=st.lists(st.integers(0, 3 * BLOCK + 5), max_size=6),
    bad=st.integers(0, 3 * BLOCK),
)
def test_hashes_do_not_depend_on_how_the_bytes_came_and_find_any_change(size: int, cuts: list[int], bad: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    hasher, at = BlockHasher(), 0
    for cut in [*sorted(cut for cut in cuts if cut <= size), size]:
        hasher.update(memoryview(content)[at:cut])
        at = cut
    digests = hasher.finish()
    assert len(digests) == DIGEST * blocks_of(size)
    assert not list(wrong_blocks(digests, 0, content))
    assert not list(wrong_blocks(digests, 1, content[BLOCK:]))
    if bad < size:
        spoilt = bytearray(content)
        spoilt[bad] ^= 1
        assert list(wrong_blocks(digests, 0, bytes(spoilt))) == [bad // BLOCK]


def test_prepare_keeps_them_and_merge_carries_them_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "abc " * 2000 + str(n)}) + "\n" for n in range(40)))
    for name in ("one", "two"):
        prepare([str(tmp_path / "a.jsonl")], ByteTokenizer(), tmp_path / name, PrepareOptions(shards=2))
    merge([tmp_path / "one", tmp_path / "two"], tmp_path / "both")
    for name, shards in (("one", 2), ("both", 4)):
        manifest = read_manifest(tmp_path / name)
        assert len(manifest.shards) == shards
        for shard in manifest.shards:
            content = (tmp_path / name / f"{shard.name}.blocks").read_bytes()
            assert hashlib.sha256(content).hexdigest() == shard.blocks_sha256
        assert verify(tmp_path / name).faults == []


def test_verify_names_the_bad_block(copy: Path) -> None:
    spoil(copy / "shard-00001.bin", 5 * BLOCK + 17)
    spoil(copy / "shard-00001.bin", 7 * BLOCK)
    spoil(copy / "shard-00000.idx", 40)
    faults = {Path(f.file).name: f.what for f in reversed(verify(copy).faults) if "sha256" in f.what}
    assert f"block 5 (bytes {5 * BLOCK:,} to {6 * BLOCK - 1:,}) and 1 more of 9 differs" in faults["shard-00001.bin"]
    assert "block 0" in faults["shard-00000.idx"]
    spoil(copy / "shard-00001.blocks", 3)
    assert any(Path(f.file).name == "shard-00001.blocks" for f in verify(copy).faults)
    (copy / "shard-00001.blocks").unlink()
    assert any("cannot be read" in f.what for f in verify(copy).faults)


def test_a_truncated_file_is_described_not_blamed_on_every_block(copy: Path) -> None:
    with (copy / "shard-00000.bin").open("r+b") as file:
        file.truncate(3 * BLOCK)
    faults = [f.what for f in verify(copy).faults]
    assert any("bytes, but its .idx describes" in what for what in faults)
    assert not any("block 0" in what for what in faults)


@pytest.mark.parametrize("block_bytes", [BLOCK, 4 * BLOCK])
def test_a_block_the_store_has_spoilt_is_refused_when_it_is_read(copy: Path, tmp_path: Path, block_bytes: int) -> None:
    spoil(copy / "shard-00001.bin", 6 * BLOCK + 9)
    corpus, whole = open_streamed(f"file://{copy}", tmp_path / "cache", block_bytes=block_bytes), open_corpus(copy)
    start = whole.shards[0].tokens
    assert np.array_equal(corpus.read(0, start + 1000), whole.read(0, start + 1000))
    with pytest.raises(ArgosyError) as refusal:
        corpus.read(start + 6 * BLOCK // 2, 100)
    assert refusal.value.code == "data.corrupt"
    assert "shard-00001.bin: block 6 " in refusal.value.cause
    kept = (tmp_path / "cache").glob(f"argosy-*/blocks/shard-00001-*/{6 * BLOCK // block_bytes:08d}")
    assert not list(kept)
    corpus.close()


def test_a_block_spoilt_on_its_way_is_fetched_again(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, spoilt = from_directory(local.parent), []
    monkeypatch.setenv("no_proxy", "*")

    def spoil_once(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        status, answer_headers, content = serve(method, path, headers, body)
        if method == "GET" and path.endswith(".bin") and not spoilt:
            spoilt.append(path)
            content = bytes([content[0] ^ 1]) + content[1:]
        return status, answer_headers, content

    server = FaultyServer(spoil_once)
    url = f"{server.url}/corpus"
    corpus = open_streamed(url, tmp_path / "cache", store=patient(url), block_bytes=BLOCK)
    assert np.array_equal(corpus.read(0, corpus.tokens), open_corpus(local).read(0, corpus.tokens))
    assert spoilt
    corpus.close()
    server.close()


def test_a_corpus_without_them_is_read_as_before(copy: Path, tmp_path: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    for shard in manifest["shards"]:
        del shard["blocks_sha256"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    for file in copy.glob("*.blocks"):
        file.unlink()
    corpus = open_streamed(f"file://{copy}", tmp_path / "cache")
    assert np.array_equal(corpus.read(0, corpus.tokens), open_corpus(copy).read(0, corpus.tokens))
    assert verify(copy).faults == []
    corpus.close()

"""`merge` gives the bytes of Megatron's own merge, and a refused merge leaves nothing behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import tempfile
from pathlib import Path

import numpy as np
import pytest
import typer
from corpora import read_pair, text_document, write_corpus, write_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from argosy.cli import data_corpus
from argosy.data.corpus import merge as merge_module
from argosy.data.corpus.corpus import open_corpus
from argosy.data.corpus.corpus_manifest import read_manifest
from argosy.data.corpus.indexed import bin_path, idx_path
from argosy.data.corpus.merge import merge
from argosy.data.corpus.verify import verify
from argosy.errors import ArgosyError

A, B = [text_document("first"), [[]], [[1, 2], [3]]], [text_document("second")]
# Several pairs of documents of sequences.
PAIRS = st.lists(
    st.lists(st.lists(st.lists(st.integers(0, 65000), min_size=1, max_size=6), max_size=3), max_size=6),
    min_size=1,
    max_size=4,
)


@settings(max_examples=50, deadline=None)
@given(PAIRS, st.sampled_from(["uint16", "int32"]), st.integers(1, 5))
def test_a_merged_pair_is_what_megatron_makes(pairs: list[list[list[list[int]]]], dtype: str, block: int) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_module, "_ENTRIES", block)
        # Megatron calls it for each input: 0.1 s with torch loaded.
        patch.setattr(gc, "collect", lambda: 0)
        root = Path(name)
        prefixes = [root / f"part{i}" for i in range(len(pairs))]
        for prefix, documents in zip(prefixes, pairs, strict=True):
            write_pair(prefix, documents, dtype)
        builder = IndexedDatasetBuilder(str(root / "theirs.bin"), dtype=np.dtype(dtype).type)
        for prefix in prefixes:
            builder.add_index(str(prefix))
        builder.finalize(str(root / "theirs.idx"))

        merge(prefixes, root / "ours")
        assert (root / "ours.bin").read_bytes() == (root / "theirs.bin").read_bytes()
        assert (root / "ours.idx").read_bytes() == (root / "theirs.idx").read_bytes()
        assert read_pair(root / "ours") == [document for prefix in prefixes for document in read_pair(prefix)]


def test_a_directory_of_pairs_is_merged_in_megatrons_order(tmp_path: Path) -> None:
    for name, documents in (("b", B), ("a", A), ("a10", B)):
        write_pair(tmp_path / "in" / name, documents)
    merged = merge([tmp_path / "in"], tmp_path / "out")
    assert (merged.kind, merged.documents) == ("pair", 5)
    names = ("a", "a10", "b")
    assert read_pair(tmp_path / "out") == [document for n in names for document in read_pair(tmp_path / "in" / n)]


def test_a_loop_of_links_as_the_output_is_refused(tmp_path: Path) -> None:
    write_pair(tmp_path / "in", A)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ArgosyError, match="write-failed"):
        merge([tmp_path / "in"], tmp_path / "loop" / "out")


def test_corpora_become_a_corpus_with_all_their_books(tmp_path: Path) -> None:
    one, two = write_corpus(tmp_path / "one", [A, B]), write_corpus(tmp_path / "two", [B])
    for path in (one, two):
        (path / "quarantine.jsonl").write_text(f'{{"file": "{path.name}"}}\n')
    merged = merge([one, two], tmp_path / "out")
    assert (merged.kind, merged.shards, merged.documents) == ("corpus", 3, 5)
    assert (tmp_path / "out" / "quarantine.jsonl").read_text() == '{"file": "one"}\n{"file": "two"}\n'
    manifest = read_manifest(tmp_path / "out")
    assert manifest.quarantined == {"broken-json": 2}
    assert [source.documents for source in manifest.sources] == [4, 1]
    assert verify(tmp_path / "out").faults == []
    out = open_corpus(tmp_path / "out")
    assert out.read(0, out.tokens).tolist() == [t for d in (A, B, B) for doc in d for s in doc for t in s]


def test_damage_of_an_input_is_still_found_in_the_merged_corpus(tmp_path: Path) -> None:
    one, two = write_corpus(tmp_path / "one", [A]), write_corpus(tmp_path / "two", [B])
    (two / "shard-00000.bin").write_bytes(b"\x07" + (two / "shard-00000.bin").read_bytes()[1:])
    merge([one, two], tmp_path / "out")
    [fault] = verify(tmp_path / "out").faults
    assert fault.file.endswith("shard-00001.bin")


def test_corpora_become_a_pair_when_asked(tmp_path: Path) -> None:
    one, two = write_corpus(tmp_path / "one", [A]), write_corpus(tmp_path / "two", [B], append_eod=False)
    assert merge([one, two], tmp_path / "pair.bin", as_pair=True).output == str(tmp_path / "pair")
    assert len(read_pair(tmp_path / "pair")) == 4
    with pytest.raises(ArgosyError, match="do not end alike"):
        merge([one, two], tmp_path / "out")


def test_different_dtypes_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", A, "uint16")
    write_pair(tmp_path / "b", B, "int32")
    with pytest.raises(ArgosyError, match=r"uint16 tokens.*int32") as refusal:
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert refusal.value.code == "data.cannot-merge"


def test_different_tokenizers_are_refused_even_as_a_pair(tmp_path: Path) -> None:
    one, two = write_corpus(tmp_path / "one", [A]), write_corpus(tmp_path / "two", [B])
    text = (two / "manifest.json").read_text()
    (two / "manifest.json").write_text(text.replace("bytes-v1", "another"))
    for as_pair in (True, False, None):
        with pytest.raises(ArgosyError) as refusal:
            merge([one, two], tmp_path / "out", as_pair=as_pair)
        assert refusal.value.code == "tokenizer.mismatch"


def test_a_bare_pair_cannot_become_part_of_a_corpus(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", A)
    one = write_corpus(tmp_path / "one", [B])
    with pytest.raises(ArgosyError, match="has no manifest"):
        merge([one, tmp_path / "a"], tmp_path / "out", as_pair=False)
    assert merge([one, tmp_path / "a"], tmp_path / "out").kind == "pair"


def test_an_input_is_never_its_own_output(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", A)
    one = write_corpus(tmp_path / "one", [B])
    for inputs, output in (([tmp_path / "a"], tmp_path / "a"), ([one], one), ([one], tmp_path / "sub" / ".." / "one")):
        (tmp_path / "sub").mkdir(exist_ok=True)
        with pytest.raises(ArgosyError, match="also an input"):
            merge(inputs, output, overwrite=True)
    assert verify(one).faults == []


def test_what_exists_is_replaced_only_when_asked_and_then_as_a_whole(tmp_path: Path) -> None:
    one, two = write_corpus(tmp_path / "one", [A, B, B]), write_corpus(tmp_path / "two", [B])
    merge([one], tmp_path / "out")
    with pytest.raises(ArgosyError) as refusal:
        merge([two], tmp_path / "out")
    assert refusal.value.code == "data.output-exists"
    merge([two], tmp_path / "out", overwrite=True)
    assert sorted(p.name for p in (tmp_path / "out").glob("*.bin")) == ["shard-00000.bin"]
    assert verify(tmp_path / "out").faults == []


def test_pointers_that_do_not_follow_from_lengths_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[[1, 2]], [[3]], [[4]]])
    data = bytearray((tmp_path / "a.idx").read_bytes())
    data[34 + 12 + 8] = 0
    (tmp_path / "a.idx").write_bytes(data)
    with pytest.raises(ArgosyError) as refusal:
        merge([tmp_path / "a"], tmp_path / "out")
    assert refusal.value.code == "data.bad-index"


@pytest.mark.parametrize("as_pair", [True, False])
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, as_pair: bool) -> None:
    one = write_corpus(tmp_path / "one", [[[[5] * 40_000]]])
    two = write_corpus(tmp_path / "two", [[[[5] * 60_000]]])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file that grows past this limit fails as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ArgosyError) as refusal:
            merge([one, two], tmp_path / "out" / "x", as_pair=as_pair)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refusal.value.code == "data.write-failed"
    assert [p for p in (tmp_path / "out").rglob("*") if p.is_file()] == []


def test_a_disk_known_to_be_too_small_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path / "a", A)
    usage = merge_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(merge_module.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(ArgosyError, match=r"need .* bytes, .* has 10 free"):
        merge([tmp_path / "a"], tmp_path / "out")


@pytest.mark.parametrize("failing", [("copy_file_range",), ("copy_file_range", "sendfile")])
def test_file_systems_without_kernel_copies_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: tuple[str, ...]
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EXDEV, "not across file systems")

    for name in failing:
        monkeypatch.setattr(os, name, fails)
    monkeypatch.setattr(merge_module, "_CHUNK", 5)
    write_pair(tmp_path / "a", A)
    write_pair(tmp_path / "b", B)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert bin_path(tmp_path / "out").read_bytes() == b"".join(bin_path(tmp_path / n).read_bytes() for n in "ab")
    assert idx_path(tmp_path / "out").exists()


def test_the_verb_merges_and_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", A)
    app = typer.Typer()
    app.command()(data_corpus.merge)
    arguments = [str(tmp_path / "a"), str(tmp_path / "a"), "--output", str(tmp_path / "out"), "--json"]
    planned = json.loads(CliRunner().invoke(app, [*arguments, "--dry-run"]).stdout)
    assert not (tmp_path / "out.idx").exists()
    assert json.loads(CliRunner().invoke(app, arguments).stdout) == planned
    sizes = sum((tmp_path / name).stat().st_size for name in ("out.bin", "out.idx"))
    assert (planned["documents"], planned["bytes"]) == (6, sizes)

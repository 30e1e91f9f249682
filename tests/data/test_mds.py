"""MDS: files of MosaicML's own writer are read, our writer gives the same bytes, and hostile files are refused.

`golden_mds/` was written by mosaicml-streaming 0.13.0: the three documents of `GOLDEN`, in seven forms.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from corpora import read_pair, text_document, write_corpus, write_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from argosy.cli import data_corpus
from argosy.data.corpus.convert import Converted, ConvertOptions, convert
from argosy.data.corpus.corpus_manifest import read_manifest
from argosy.data.corpus.mds import MdsReader, MdsWriter
from argosy.data.corpus.verify import verify
from argosy.errors import ArgosyError

FILES = Path(__file__).parent / "golden_mds"
GOLDEN = [[1, 2, 3], [40000], list(range(300))]
PACKAGES = {"br": ("brotli", "brotli"), "snappy": ("snappy", "python-snappy")}


def read(directory: Path, **options: Any) -> list[list[int]]:
    return [tokens.tolist() for tokens in MdsReader(directory, **options).documents()]


def write_mds(directory: Path, documents: list[list[int]], encoding: str = "ndarray:uint16", **options: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    writer = MdsWriter(directory, encoding=encoding, **options)
    for document in documents:
        writer.add(np.array(document))
    writer.finish()
    return directory


def edit_index(directory: Path, change: dict[str, Any]) -> None:
    index = json.loads((directory / "index.json").read_text())
    index["shards"][0].update(change)
    (directory / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["plain", "zstd", "gz", "bz2"])
def test_files_of_mosaicmls_writer_are_read(name: str) -> None:
    assert read(FILES / name) == GOLDEN


@pytest.mark.parametrize("name", ["br", "snappy"])
def test_compressions_that_need_a_package_are_read_with_it_and_name_it_without(name: str) -> None:
    module, package = PACKAGES[name]
    if importlib.util.find_spec(module):
        assert read(FILES / name) == GOLDEN
    else:
        with pytest.raises(ArgosyError, match=f"package {package}") as refusal:
            read(FILES / name)
        assert refusal.value.code == "data.missing-extra"


def test_our_files_have_the_bytes_of_mosaicmls_writer(tmp_path: Path) -> None:
    ours = write_mds(tmp_path / "x", GOLDEN, size_limit=700)
    theirs = {file.name: file.read_bytes() for file in (FILES / "same").iterdir()}
    assert len(theirs) == 3
    assert {file.name: file.read_bytes() for file in ours.iterdir()} == theirs


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 65000), min_size=1, max_size=400), max_size=12),
    st.sampled_from(["ndarray:uint16", "ndarray:int32", "bytes"]),
    st.sampled_from([None, 3]),
    st.integers(200, 3000),
)
def test_what_is_written_is_read_back(
    documents: list[list[int]], encoding: str, level: int | None, size_limit: int
) -> None:
    with tempfile.TemporaryDirectory() as root:
        path = write_mds(Path(root) / "x", documents, encoding, zstd_level=level, size_limit=size_limit)
        assert read(path) == documents
        for shard in MdsReader(path).shards:
            assert shard.raw_data.bytes <= size_limit or shard.samples == 1


@pytest.mark.parametrize("size_limit", range(310, 325))
def test_shards_are_as_full_as_their_limit_allows(tmp_path: Path, size_limit: int) -> None:
    # The offset, the size, the shape of the array, and one token.
    sample = 4 + 4 + 2 + 2
    path = write_mds(tmp_path / "x", [[i] for i in range(40)], size_limit=size_limit)
    sizes = [shard.raw_data.bytes for shard in MdsReader(path).shards]
    assert len(sizes) > 1
    assert all(size <= size_limit < size + sample for size in sizes[:-1])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=50), max_size=12),
    st.sampled_from([None, "ndarray:int32", "bytes"]),
    st.sampled_from([None, "zstd"]),
)
def test_a_corpus_survives_the_way_to_mds_and_back(
    documents: list[list[int]], encoding: str | None, compression: str | None
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        corpus = write_corpus(root / "corpus", [[[document] for document in documents], []])
        convert(corpus, root / "mds", ConvertOptions(encoding=encoding, compression=compression))
        convert(root / "mds", root / "back", ConvertOptions(tokenizer="bytes"))
        assert verify(root / "back").faults == []
        for ending in ("bin", "idx"):
            one, two = (root / n / f"shard-00000.{ending}" for n in ("corpus", "back"))
            assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32", "int64", None])
def test_ids_as_plain_bytes_are_of_the_type_asked_for_both_ways(tmp_path: Path, dtype: str | None) -> None:
    documents = [[1, 2, 65000], [7]]
    write_pair(tmp_path / "x", [[document] for document in documents])
    convert(tmp_path / "x", tmp_path / "mds", ConvertOptions(encoding="bytes", bytes_dtype=dtype))
    data = (tmp_path / "mds" / "shard.00000.mds").read_bytes()
    first, end = np.frombuffer(data, "<u4", 2, 4)
    # llm-foundry reads it this way.
    assert np.frombuffer(data[first + 4 : end], dtype or "int64").tolist() == documents[0]
    convert(tmp_path / "mds", tmp_path / "back", ConvertOptions(bytes_dtype=dtype))
    assert [sequence for [sequence] in read_pair(tmp_path / "back")] == documents


def test_a_type_of_bytes_that_does_nothing_or_is_too_narrow_is_refused(tmp_path: Path) -> None:
    write_pair(tmp_path / "x", [[[70_000, 3]]], "int32")
    mds = write_mds(tmp_path / "mds", [[1]])
    for source, options, code in (
        (tmp_path / "x", ConvertOptions(bytes_dtype="int32"), "config.conflict"),
        (mds, ConvertOptions(bytes_dtype="int32"), "config.conflict"),
        (tmp_path / "x", ConvertOptions(encoding="bytes", bytes_dtype="uint16"), "config.bad-value"),
    ):
        with pytest.raises(ArgosyError) as refusal:
            convert(source, tmp_path / "out", options)
        assert (refusal.value.code, refusal.value.key) == (code, "--bytes-dtype")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ArgosyError, match="does not fit"):
        write_mds(tmp_path / "narrow", [[70_000]], "bytes", bytes_dtype="uint16")


def test_mds_becomes_a_bare_pair_or_with_a_tokenizer_a_corpus(tmp_path: Path) -> None:
    mds = write_mds(tmp_path / "mds", [[104, 105, 256], [33, 256]])
    pair = convert(mds, tmp_path / "pair", ConvertOptions())
    assert (pair.kind, pair.stored_as, pair.documents, pair.tokens) == ("pair", "uint16", 2, 5)
    assert read_pair(tmp_path / "pair") == [[[104, 105, 256]], [[33, 256]]]
    convert(mds, tmp_path / "corpus", ConvertOptions(tokenizer="bytes"))
    manifest = read_manifest(tmp_path / "corpus")
    assert (manifest.documents, manifest.append_eod, manifest.tokenizer.eod_id) == (2, True, 256)


def test_documents_without_the_end_token_are_not_said_to_have_one(tmp_path: Path) -> None:
    mds = write_mds(tmp_path / "mds", [[104, 256], [33]])
    convert(mds, tmp_path / "corpus", ConvertOptions(tokenizer="bytes"))
    assert read_manifest(tmp_path / "corpus").append_eod is False


def test_ids_beyond_the_vocabulary_are_refused_and_leave_no_corpus(tmp_path: Path) -> None:
    mds = write_mds(tmp_path / "mds", [[1], [257]])
    with pytest.raises(ArgosyError, match="sample 1 holds the id 257") as refusal:
        convert(mds, tmp_path / "corpus", ConvertOptions(tokenizer="bytes"))
    assert refusal.value.code == "tokenizer.vocabulary"
    assert list((tmp_path / "corpus").iterdir()) == []


def test_plain_bytes_read_as_the_wrong_type_are_noticed(tmp_path: Path) -> None:
    raw = write_mds(tmp_path / "raw", [[50000 | 50001 << 16 | 50002 << 32]], "bytes")
    with pytest.raises(ArgosyError) as refusal:
        convert(raw, tmp_path / "out", ConvertOptions())
    assert "--bytes-dtype" in refusal.value.fix
    assert convert(raw, tmp_path / "out", ConvertOptions(bytes_dtype="uint16")).tokens == 4
    assert read_pair(tmp_path / "out") == [[[50000, 50001, 50002, 0]]]


WORDS = np.random.default_rng(5)
PAST_16_BITS = [WORDS.integers(0, 128_256, size).tolist() for size in (64, 128, 32)]
CORPORA = {
    "gpt2": [np.minimum(WORDS.zipf(1.3, size), 50_256).tolist() for size in (64, 96, 32, 128)],
    "llama3": PAST_16_BITS,
    "padded": [[*WORDS.integers(1, 32_000, size).tolist(), *[0] * (256 - size)] for size in (40, 21, 90, 13, 7)],
    "bytes": [WORDS.integers(32, 257, size).tolist() for size in (100, 40, 200)],
    "zero and one": [WORDS.integers(0, 2, size).tolist() for size in (128, 256)],
    "dna": [WORDS.integers(0, 6, size).tolist() for size in (128, 256)],
    "all padding": [[0] * 64, [0] * 32],
    "short": [[7, 0], [9, 0, 0, 0]],
    "millions": [WORDS.integers(0, 40_000_000, size).tolist() for size in (128, 64)],
    "hashes": [WORDS.integers(0, 2**31, size).tolist() for size in (512, 640)],
}
TYPES = {"uint16": 2, "int32": 4, "uint32": 4, "int64": 8}


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("written", TYPES)
def test_ids_read_as_the_type_they_were_written_in_are_never_refused(tmp_path: Path, name: str, written: str) -> None:
    documents = CORPORA[name]
    if max(max(document) for document in documents) > np.iinfo(written).max:
        return
    # Many small shards, or one.
    for size_limit in (400, 1 << 20):
        mds = write_mds(tmp_path / f"{size_limit}", documents, "bytes", bytes_dtype=written, size_limit=size_limit)
        assert read(mds, bytes_dtype=written) == documents


@pytest.mark.parametrize("name", ["gpt2", "llama3", "padded", "bytes"])
@pytest.mark.parametrize("written", TYPES)
@pytest.mark.parametrize("asked", TYPES)
@pytest.mark.parametrize("size_limit", [400, 1 << 20])
def test_ids_read_as_another_type_are_refused_with_the_right_one(
    tmp_path: Path, name: str, written: str, asked: str, size_limit: int
) -> None:
    documents = CORPORA[name]
    if TYPES[asked] == TYPES[written] or max(max(document) for document in documents) > np.iinfo(written).max:
        return
    mds = write_mds(tmp_path / "mds", documents, "bytes", bytes_dtype=written, size_limit=size_limit)
    with pytest.raises(ArgosyError) as refusal:
        convert(mds, tmp_path / "out", ConvertOptions(bytes_dtype=asked))
    assert not list(tmp_path.glob("out*"))
    assert (refusal.value.code, refusal.value.key) == ("data.bad-mds", "--bytes-dtype")
    fitting = refusal.value.fix.removeprefix("--bytes-dtype ")
    assert TYPES[fitting] == TYPES[written]
    with pytest.raises(ArgosyError):
        convert(mds, tmp_path / "out", ConvertOptions(bytes_dtype=asked), dry_run=True)


def test_a_shard_of_another_type_is_noticed(tmp_path: Path) -> None:
    """A data set that was merged from two can have shards of different types."""
    mds = write_mds(tmp_path / "x", CORPORA["gpt2"] * 20, "bytes", bytes_dtype="uint16")
    wide = write_mds(tmp_path / "wide", CORPORA["gpt2"] * 20, "bytes", bytes_dtype="int64")
    index, second = (json.loads((path / "index.json").read_text()) for path in (mds, wide))
    second["shards"][0]["raw_data"]["basename"] = "wide.mds"
    shutil.copy(wide / "shard.00000.mds", mds / "wide.mds")
    index["shards"] += second["shards"]
    (mds / "index.json").write_text(json.dumps(index))
    with pytest.raises(ArgosyError, match=r"wide\.mds.*is not uint16"):
        read(mds, bytes_dtype="uint16")


def test_what_mds_cannot_hold_is_told(tmp_path: Path) -> None:
    write_pair(tmp_path / "x", [[[1, 2], [3]], [[]], [[4]]])
    result = convert(tmp_path / "x", tmp_path / "mds", ConvertOptions())
    assert read(tmp_path / "mds") == [[1, 2, 3], [4]]
    assert (result.documents, result.tokens) == (2, 4)
    assert ["1 documents without tokens" in result.notes[0], "3 sequences" in result.notes[1]] == [True, True]


def test_samples_of_fixed_length_are_cut_from_the_whole_run_of_tokens(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", [[text_document("abcd")], [text_document("efg")]])
    result = convert(corpus, tmp_path / "mds", ConvertOptions(seq_len=4))
    assert read(tmp_path / "mds") == [[97, 98, 99, 100], [256, 101, 102, 103]]
    assert "last 1 tokens" in result.notes[0]


def test_wide_ids_stay_wide(tmp_path: Path) -> None:
    write_pair(tmp_path / "x", [[[100_000, 5]]], "int32")
    assert convert(tmp_path / "x", tmp_path / "mds", ConvertOptions()).stored_as == "ndarray:int32"
    assert read(tmp_path / "mds") == [[100_000, 5]]
    with pytest.raises(ArgosyError, match="must hold"):
        convert(tmp_path / "x", tmp_path / "other", ConvertOptions(encoding="ndarray:uint16"))


def test_shards_of_an_overwritten_data_set_do_not_linger(tmp_path: Path) -> None:
    write_pair(tmp_path / "x", [[[1] * 50]] * 20)
    write_pair(tmp_path / "y", [[[2]]])
    convert(tmp_path / "x", tmp_path / "mds", ConvertOptions(size_limit=600))
    with pytest.raises(ArgosyError) as refusal:
        convert(tmp_path / "y", tmp_path / "mds", ConvertOptions(compression="zstd"))
    assert refusal.value.code == "data.output-exists"
    convert(tmp_path / "y", tmp_path / "mds", ConvertOptions(compression="zstd", overwrite=True))
    assert sorted(p.name for p in (tmp_path / "mds").iterdir()) == ["index.json", "shard.00000.mds.zstd"]
    assert read(tmp_path / "mds") == [[2]]


@pytest.mark.parametrize("encoding", ["pkl", "pkl:x"])
def test_pickle_columns_are_refused_and_never_loaded(tmp_path: Path, encoding: str) -> None:
    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "pwned",)

    directory = write_mds(tmp_path / "x", [[1]], "bytes")
    with (directory / "shard.00000.mds").open("ab") as file:
        file.write(pickle.dumps(Touch()))
    edit_index(directory, {"column_encodings": [encoding]})
    with pytest.raises(ArgosyError, match="pickled") as refusal:
        read(directory)
    assert refusal.value.code == "data.bad-mds"
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "..", "", "a\\..\\b", "C:x", "x\0y"])
def test_names_that_lead_out_of_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    directory = write_mds(tmp_path / "x", [[1]])
    for part in ("raw_data", "zip_data"):
        edit_index(directory, {part: {"basename": name, "bytes": 5, "hashes": {}}})
        with pytest.raises(ArgosyError, match="leads out") as refusal:
            read(directory)
        assert refusal.value.code == "data.bad-mds"


def test_shards_in_subdirectories_of_a_merged_data_set_are_read(tmp_path: Path) -> None:
    directory = write_mds(tmp_path / "x", [[1, 2]])
    (directory / "0").mkdir()
    shutil.move(directory / "shard.00000.mds", directory / "0" / "shard.00000.mds")
    raw = json.loads((directory / "index.json").read_text())["shards"][0]["raw_data"]
    edit_index(directory, {"raw_data": raw | {"basename": "0/shard.00000.mds"}})
    assert read(directory) == [[1, 2]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_flipped_byte_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    level = data.draw(st.sampled_from([None, 3]))
    directory = write_mds(tmp_path_factory.mktemp("flip") / "x", [[1, 2, 3], [4]], zstd_level=level)
    [file] = directory.glob("shard*")
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    with pytest.raises(ArgosyError) as refusal:
        read(directory)
    assert refusal.value.code == "data.bad-mds"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_without_hashes_is_refused_or_read_but_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    encoding = data.draw(st.sampled_from(["ndarray:uint16", "bytes"]))
    directory = write_mds(tmp_path_factory.mktemp("fuzz") / "x", [[1, 2, 3], [4] * 300], encoding, hashes=[])
    edit_index(directory, {"column_encodings": [data.draw(st.sampled_from([encoding, "ndarray", "ndarray:int32:3"]))]})
    file = directory / "shard.00000.mds"
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    refused = None
    try:
        read(directory)
    except ArgosyError as error:
        refused = error.code
    assert refused in (None, "data.bad-mds")


def test_a_bomb_is_not_unpacked_past_its_declared_size(tmp_path: Path) -> None:
    import bz2
    import gzip

    import zstandard

    directory = write_mds(tmp_path / "x", [[1]], hashes=[])
    (directory / "shard.00000.mds").unlink()
    zeros = bytes(64 << 20)
    for kind, packed in (
        ("zstd", zstandard.compress(zeros)),
        ("gz", gzip.compress(zeros, 1)),
        ("bz2", bz2.compress(zeros, 1)),
    ):
        (directory / "bomb").write_bytes(packed)
        facts = {"basename": "bomb", "bytes": len(packed), "hashes": {}}
        edit_index(directory, {"zip_data": facts, "compression": kind})
        with pytest.raises(ArgosyError, match="does not decompress to the"):
            read(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"format": "json"},
        {"samples": 7},
        {"samples": -1},
        {"column_sizes": []},
        {"column_names": ["other"]},
        {"column_encodings": ["str"]},
        {"column_encodings": ["ndarray:float32"]},
        {"column_encodings": ["ndarray:uint16:x"]},
        {"column_sizes": [1 << 30]},
        {"compression": "rar"},
        {"raw_data": {"basename": "gone.mds", "bytes": 5, "hashes": {}}},
        {"raw_data": {"basename": "shard.00000.mds", "bytes": 1 << 33, "hashes": {}}},
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    directory = write_mds(tmp_path / "x", [[1]])
    edit_index(directory, change)
    with pytest.raises(ArgosyError) as refusal:
        read(directory)
    assert refusal.value.code == "data.bad-mds"


def test_a_directory_of_splits_names_them(tmp_path: Path) -> None:
    write_mds(tmp_path / "train", [[1]])
    with pytest.raises(ArgosyError) as refusal:
        MdsReader(tmp_path)
    assert str(tmp_path / "train") in refusal.value.fix


def test_options_of_the_other_direction_are_refused(tmp_path: Path) -> None:
    mds = write_mds(tmp_path / "mds", [[1]])
    write_pair(tmp_path / "x", [[[1]]])
    for source, options in (
        (mds, ConvertOptions(seq_len=4)),
        (mds, ConvertOptions(compression="zstd")),
        (tmp_path / "x", ConvertOptions(tokenizer="bytes")),
    ):
        with pytest.raises(ArgosyError) as refusal:
            convert(source, tmp_path / "out", options)
        assert refusal.value.code == "config.conflict"
    with pytest.raises(ArgosyError, match="zstd with a level"):
        convert(tmp_path / "x", tmp_path / "out", ConvertOptions(compression="br"))


def test_the_verb_converts_and_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    write_pair(tmp_path / "x", [[[1, 2]], [[3]]])
    app = typer.Typer()
    app.command()(data_corpus.convert)
    arguments = [str(tmp_path / "x"), "--output", str(tmp_path / "mds"), "--json", "--compression", "zstd"]
    planned = Converted(**json.loads(CliRunner().invoke(app, [*arguments, "--dry-run"]).stdout))
    assert not (tmp_path / "mds").exists()
    assert Converted(**json.loads(CliRunner().invoke(app, arguments).stdout)) == planned
    assert (planned.documents, planned.tokens) == (2, 3)

"""`prepare`: every record becomes a document or is quarantined, and the files match the manifest."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy.data.corpus.corpus import open_corpus
from argosy.data.corpus.corpus_manifest import read_manifest
from argosy.data.prepare import job, resuming
from argosy.data.prepare.job import prepare
from argosy.data.prepare.join import Joiner
from argosy.data.prepare.locks import PieceLocks
from argosy.data.prepare.parts import PartMaker
from argosy.data.prepare.prepare_report import parse_share
from argosy.data.prepare.work import PrepareOptions
from argosy.data.text import blocks
from argosy.data.text.inputs import find_inputs
from argosy.data.text.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer, train_bpe
from argosy.errors import EXIT_RESUMABLE, ArgosyError
from argosy.record.jsonl import read_jsonl
from argosy.retry import Clock

GOOD = b'{"text": "hello"}\n'


def run(tmp_path: Path, content: bytes, name: str = "in.jsonl", **options: object) -> Path:
    (tmp_path / name).write_bytes(content)
    prepare([str(tmp_path / name)], ByteTokenizer(), tmp_path / "out", PrepareOptions(**options))  # type: ignore[arg-type]
    return tmp_path / "out"


def texts(corpus: Path) -> list[str]:
    reader = open_corpus(corpus).shards[0]
    return [ByteTokenizer().decode(reader.sequence(i)) for i in range(reader.sequences)]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"text": "cut', "broken-json"),
        (b"not json", "broken-json"),
        (b'{"text": "lone \\ud800 surrogate"}', "lone-surrogate"),
        (b'{"text": "bad \xff byte"}', "invalid-utf8"),
        (b'{"text": "a \\u0000 NUL"}', "nul"),
        (b'{"txt": "x"}', "missing-key"),
        (b'{"text": 5}', "not-text"),
        (b'{"text": null}', "not-text"),
        (b'{"text": ["a", 5]}', "not-text"),
        (b'{"text": []}', "empty"),
        (b'["text"]', "not-an-object"),
        (b"7", "not-an-object"),
        (b'{"text": ""}', "empty"),
        (b'{"text": "  \\n"}', "empty"),
    ],
)
def test_a_bad_line_is_counted_and_quarantined_with_its_place(tmp_path: Path, line: bytes, kind: str) -> None:
    out = run(tmp_path, GOOD + line + b"\n" + GOOD)
    assert texts(out) == ["hello", "hello"]
    manifest = read_manifest(out)
    assert manifest.quarantined == {kind: 1}
    assert (manifest.documents, manifest.sources[0].quarantined) == (2, 1)
    [record] = read_jsonl(out / "quarantine.jsonl")
    assert (record["kind"], record["offset"]) == (kind, len(GOOD))
    assert record["file"].endswith("in.jsonl")


def test_a_line_too_long_to_hold_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_RECORD", 64)
    monkeypatch.setattr(blocks, "PIECE", 32)
    out = run(tmp_path, GOOD + b'{"text": "' + b"x" * 5000 + b'"}\n' + GOOD)
    assert texts(out) == ["hello", "hello"]
    assert read_manifest(out).quarantined == {"too-long": 1}


def test_the_place_of_a_line_too_long_to_hold_is_known_wherever_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MAX_RECORD", 64)
    monkeypatch.setattr(blocks, "PIECE", 32)
    long = b'{"text": "' + b"x" * 500 + b'"}\n'
    for before in (b"", GOOD, GOOD * 2, GOOD + long):
        out = run(tmp_path, before + long + GOOD, overwrite=True)
        assert list(read_jsonl(out / "quarantine.jsonl"))[-1]["offset"] == len(before)


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n", b"\n\n \n"])
def test_line_ends_and_empty_lines_do_not_matter(tmp_path: Path, ending: bytes) -> None:
    out = run(tmp_path, b'{"text": "a"}' + ending)
    assert texts(out) == ["a"]
    assert read_manifest(out).quarantined == {}


def test_text_files_are_one_document_each_or_one_a_line(tmp_path: Path) -> None:
    assert texts(run(tmp_path, b"one\ntwo\n", "a.txt")) == ["one\ntwo\n"]
    assert texts(run(tmp_path, b"one\n\ntwo", "a.txt", text_lines=True, overwrite=True)) == ["one", "two"]
    with pytest.raises(ArgosyError, match="no document"):
        run(tmp_path, b"bad \xff", "a.txt", overwrite=True)


def test_control_tokens_written_by_authors_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(["some words <|endoftext|> and more words"] * 20, 300))
    tokenizer = load_tokenizer(str(path))
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "a <|endoftext|> b"}) + "\n")
    prepare([str(tmp_path / "in.jsonl")], tokenizer, tmp_path / "out", PrepareOptions())
    ids = open_corpus(tmp_path / "out").shards[0].sequence(0)
    assert list(ids).count(tokenizer.eod_id) == 1
    assert ids[-1] == tokenizer.eod_id
    assert tokenizer.decode(ids[:-1]) == "a <|endoftext|> b"


def test_the_end_of_document_can_be_left_out(tmp_path: Path) -> None:
    out = run(tmp_path, GOOD, append_eod=False)
    assert list(open_corpus(out).read(0, 5)) == list(b"hello")
    assert open_corpus(out).tokens == 5


def test_the_manifest_tells_the_truth(tmp_path: Path) -> None:
    out = run(tmp_path, GOOD * 3 + b"broken\n")
    manifest = read_manifest(out)
    [shard] = manifest.shards
    assert hashlib.sha256((out / "shard-00000.bin").read_bytes()).hexdigest() == shard.bin_sha256
    assert hashlib.sha256((out / "shard-00000.idx").read_bytes()).hexdigest() == shard.idx_sha256
    assert (shard.tokens, shard.documents, shard.max_token) == (18, 3, 256)
    assert load_tokenizer(str(out / "tokenizer.json")).fingerprint == manifest.tokenizer.fingerprint


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    first = {p.name: p.read_bytes() for p in run(tmp_path, GOOD * 9).iterdir()}
    prepare([str(tmp_path / "in.jsonl")], ByteTokenizer(), tmp_path / "out", PrepareOptions(overwrite=True))
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == first


def test_too_many_bad_records_are_refused_and_leave_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(ArgosyError) as refusal:
        run(tmp_path, GOOD * 3 + b"broken\n", max_bad=0.1)
    assert refusal.value.code == "data.bad-records"
    assert "25.00%" in refusal.value.cause
    with pytest.raises(ArgosyError, match="without a manifest"):
        open_corpus(tmp_path / "out")
    assert (tmp_path / "out" / "quarantine.jsonl").exists()


def test_a_corpus_is_not_overwritten_unasked(tmp_path: Path) -> None:
    out = run(tmp_path, GOOD)
    # A kill just before the end leaves this directory.
    (out / ".parts").mkdir()
    with pytest.raises(ArgosyError) as refusal:
        run(tmp_path, GOOD * 2)
    assert refusal.value.code == "data.output-exists"
    assert not (out / ".parts").exists()
    assert open_corpus(out).documents == 1


@pytest.mark.parametrize("name", ["missing.jsonl", "data.csv", "empty-directory", "no-*.jsonl"])
def test_inputs_that_cannot_be_used_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "data.csv").write_bytes(b"")
    (tmp_path / "empty-directory").mkdir()
    with pytest.raises(ArgosyError) as refusal:
        prepare([str(tmp_path / name)], ByteTokenizer(), tmp_path / "out", PrepareOptions())
    assert refusal.value.code in ("data.not-found", "data.bad-input")
    assert not (tmp_path / "out").exists()


def test_directories_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        (tmp_path / "in" / name).write_text(name)
    prepare([str(tmp_path / "in")], ByteTokenizer(), tmp_path / "out", PrepareOptions())
    assert texts(tmp_path / "out") == ["a.txt", "b.txt", "sub/c.txt"]


def test_a_manifest_that_points_outside_is_refused(tmp_path: Path) -> None:
    out = run(tmp_path, GOOD)
    text = (out / "manifest.json").read_text()
    for name in ("../x", "/etc/passwd", "a/b"):
        (out / "manifest.json").write_text(text.replace("shard-00000", name))
        with pytest.raises(ArgosyError) as refusal:
            open_corpus(out)
        assert refusal.value.code == "data.bad-manifest"


def test_swapped_files_are_noticed(tmp_path: Path) -> None:
    out = run(tmp_path, GOOD * 5)
    (tmp_path / "other").mkdir()
    other = run(tmp_path / "other", GOOD * 6)
    for suffix in (".bin", ".idx"):
        (out / f"shard-00000{suffix}").write_bytes((other / f"shard-00000{suffix}").read_bytes())
    with pytest.raises(ArgosyError, match="promises 5 documents"):
        open_corpus(out)


def test_shares_are_read_as_written() -> None:
    assert (parse_share("0.1%"), parse_share("0.25")) == (0.001, 0.25)
    for bad in ("x", "-1%", "150%", ""):
        with pytest.raises(ArgosyError):
            parse_share(bad)


def test_megatron_reads_a_prepared_corpus(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    out = run(tmp_path, b"".join(json.dumps({"text": f"document {i} é漢"}).encode() + b"\n" for i in range(50)))
    theirs = IndexedDataset(str(out / "shard-00000"))
    assert len(theirs) == 50
    for i in range(50):
        assert np.array_equal(theirs[i], [*f"document {i} é漢".encode(), 256])


def test_a_corpus_inside_its_own_input_directory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(GOOD + b"broken\n")
    for _ in range(2):
        prepare([str(tmp_path / "in")], ByteTokenizer(), tmp_path / "in" / "out", PrepareOptions(overwrite=True))
        manifest = read_manifest(tmp_path / "in" / "out")
        assert [Path(source.path).name for source in manifest.sources] == ["a.jsonl"]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    assert texts(run(tmp_path, b"\xef\xbb\xbf" + GOOD)) == ["hello"]
    assert texts(run(tmp_path, b"\xef\xbb\xbfhello", "a.txt", overwrite=True)) == ["hello"]


def test_what_is_passed_over_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="argosy")
    (tmp_path / "in").mkdir()
    for name in ("a.jsonl", "notes.md", ".hidden.jsonl"):
        (tmp_path / "in" / name).write_bytes(GOOD)
    prepare([str(tmp_path / "in")], ByteTokenizer(), tmp_path / "out", PrepareOptions())
    assert "2 files of other kinds are skipped" in caplog.text
    assert texts(tmp_path / "out") == ["hello"]


def test_ids_with_gaps_need_an_embedding_up_to_the_largest() -> None:
    document = json.loads(train_bpe(["ab"] * 5, 258))
    document["added_tokens"][0]["id"] = 0
    document["model"]["vocab"]["a"] = 70_000
    assert JsonTokenizer(json.dumps(document), "gaps").vocab_size == 70_001


def test_an_unfinished_preparation_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "out" / ".parts").mkdir(parents=True)
    with pytest.raises(ArgosyError, match="unfinished"):
        open_corpus(tmp_path / "out")


def test_a_full_disk_is_not_blamed_on_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PartMaker, "_write", full)
    (tmp_path / "a.jsonl").write_text('{"text": "some"}\n')
    with pytest.raises(ArgosyError, match="No space left") as refused:
        prepare([str(tmp_path / "a.jsonl")], ByteTokenizer(), tmp_path / "corpus", PrepareOptions(workers=1))
    assert (refused.value.code, refused.value.key) == ("data.write-failed", "--output")


def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "RETRY", replace(resuming.RETRY, clock=Clock(sleep=lambda seconds: None)))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOLCK, errno.ESTALE])
@pytest.mark.parametrize("where", ["the lock", "an input", "a part", "the join", "the manifest"])
def test_a_failure_of_the_file_system_that_passes_costs_no_more_than_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, where: str
) -> None:
    without_pauses(monkeypatch)
    (tmp_path / "a.jsonl").write_text('{"text": "some"}\n{"text": "more"}\n')
    arguments = [str(tmp_path / "a.jsonl")], ByteTokenizer()
    undisturbed = prepare(*arguments, tmp_path / "undisturbed", PrepareOptions(workers=1))
    owner, name = {
        "the lock": (PieceLocks, "take_all"),
        "an input": (blocks.LineBlocks, "block"),
        "a part": (PartMaker, "_write"),
        "the join": (Joiner, "finish"),
        "the manifest": (job, "finish"),
    }[where]
    working, failures = getattr(owner, name), [OSError(code, os.strerror(code)) for _ in range(2)]

    def sometimes(*given: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return working(*given, **named)

    monkeypatch.setattr(owner, name, sometimes)
    made = prepare(*arguments, tmp_path / "corpus", PrepareOptions(workers=1))
    assert undisturbed is not None
    assert made is not None
    assert made[tmp_path / "corpus"].shards == undisturbed[tmp_path / "undisturbed"].shards
    assert caplog.text.count(f"{os.strerror(code)}; going on in") == 2


def test_a_failure_that_lasts_ends_a_command_that_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pauses(monkeypatch)
    tried = []

    def fail(*_: object) -> None:
        tried.append(1)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(PartMaker, "_write", fail)
    (tmp_path / "a.jsonl").write_text('{"text": "some"}\n')
    with pytest.raises(ArgosyError, match="Input/output error") as refused:
        prepare([str(tmp_path / "a.jsonl")], ByteTokenizer(), tmp_path / "corpus", PrepareOptions(workers=1))
    assert (refused.value.code, refused.value.exit_code) == ("data.interrupted", EXIT_RESUMABLE)
    assert "run the same command again" in refused.value.fix
    assert len(tried) == resuming.RETRY.attempts


def test_a_store_that_cannot_be_listed_is_refused_whatever_its_library_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception):
        pass

    def connect(url: str, **options: object) -> None:
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr("fsspec.core.url_to_fs", connect)
    with pytest.raises(ArgosyError, match="cannot be read: NoCredentialsError: Unable to locate") as refused:
        find_inputs(["s3://bucket/a.jsonl"])
    assert "AWS_ACCESS_KEY_ID" in refused.value.fix


def test_no_corpus_is_made_among_texts(tmp_path: Path) -> None:
    # A name that --overwrite would take for one of its own files.
    source = tmp_path / "shard-0.jsonl"
    source.write_bytes(GOOD)
    for options in (PrepareOptions(), PrepareOptions(overwrite=True)):
        with pytest.raises(ArgosyError, match="a corpus needs its own directory"):
            prepare([str(source)], ByteTokenizer(), tmp_path, options)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
    prepare([str(tmp_path)], ByteTokenizer(), tmp_path / "corpus", PrepareOptions())
    assert texts(tmp_path / "corpus") == ["hello"]


def test_inputs_without_a_record_are_told_from_bad_ones(tmp_path: Path) -> None:
    with pytest.raises(ArgosyError, match="the inputs hold no record") as refused:
        run(tmp_path, b"\n")
    assert "--key" not in refused.value.fix

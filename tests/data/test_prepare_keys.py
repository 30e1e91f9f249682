"""Several keys give one corpus each, with the same records in the same order."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from argosy.data.corpus.corpus import open_corpus
from argosy.data.corpus.corpus_manifest import read_manifest
from argosy.data.prepare import part_runner
from argosy.data.prepare import work as preparing
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions, corpora_of
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.errors import ArgosyError
from argosy.record.jsonl import read_jsonl

KEYS = ("title", "meta.body")


def records(count: int) -> list[dict[str, object]]:
    return [{"title": f"title {i}", "meta": {"body": [f"body {i}.", "More." * (i % 7 + 1)]}} for i in range(count)]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(path: Path, output: Path, keys: tuple[str, ...], **options: object) -> Path:
    assert prepare([str(path)], ByteTokenizer(), output, PrepareOptions(keys=keys, **options)) is not None  # type: ignore[arg-type]
    return output


def pair(corpus: Path) -> tuple[bytes, bytes]:
    return (corpus / "shard-00000.bin").read_bytes(), (corpus / "shard-00000.idx").read_bytes()


def documents(corpus: Path) -> list[str]:
    found = []
    for reader in open_corpus(corpus).shards:
        bounds = reader.document_indices.tolist()
        for first, last in pairwise(bounds):
            found.append("".join(ByteTokenizer().decode(reader.sequence(i)) for i in range(first, last)))
    return found


def test_each_key_is_the_corpus_it_would_be_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "x.jsonl", records(50))
    both = make(source, tmp_path / "both", KEYS)
    assert sorted(path.name for path in both.iterdir()) == ["meta.body", "title"]
    for key in KEYS:
        alone = make(source, tmp_path / key, (key,))
        assert pair(both / key) == pair(alone)
        assert read_manifest(both / key) == read_manifest(alone)


def test_tables_and_lines_give_the_same(tmp_path: Path) -> None:
    lines = make(write(tmp_path / "x.jsonl", records(50)), tmp_path / "lines", KEYS)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records(50)), tmp_path / "x.parquet")
    table = make(tmp_path / "x.parquet", tmp_path / "table", KEYS)
    assert [pair(table / key) for key in KEYS] == [pair(lines / key) for key in KEYS]


def test_a_record_without_one_of_the_keys_is_in_none_of_the_corpora(tmp_path: Path) -> None:
    rows = records(4)
    del rows[1]["title"]
    rows[2]["meta"] = {"body": ""}
    out = make(write(tmp_path / "x.jsonl", rows), tmp_path / "out", KEYS)
    assert documents(out / "title") == ["title 0", "title 3"]
    assert [text.partition(".")[0] for text in documents(out / "meta.body")] == ["body 0", "body 3"]
    for key in KEYS:
        assert read_manifest(out / key).quarantined == {"missing-key": 1, "empty": 1}
        bad = [(record["kind"], record["detail"]) for record in read_jsonl(out / key / "quarantine.jsonl")]
        assert bad == [("missing-key", "title: no 'title' among meta"), ("empty", "meta.body: no text")]


@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_shards_and_shuffling_keep_the_keys_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle_seed: int | None
) -> None:
    monkeypatch.setattr(preparing, "block_size", lambda files: 1 << 12)
    monkeypatch.setattr(part_runner, "_INLINE_BYTES", 1 << 12)
    source = write(tmp_path / "x.jsonl", records(400))
    one = make(source, tmp_path / "one", KEYS, workers=1, shards=3, shuffle_seed=shuffle_seed)
    two = make(source, tmp_path / "two", KEYS, workers=2, shards=3, shuffle_seed=shuffle_seed)
    titles, bodies = (documents(two / key) for key in KEYS)
    assert len(titles) == 400
    assert [text.split()[1] for text in titles] == [text.partition(".")[0].split()[1] for text in bodies]
    for key in KEYS:
        files = [{path.name: path.read_bytes() for path in (made / key).iterdir()} for made in (one, two)]
        assert files[0] == files[1]


def test_the_directory_of_all_keys_is_no_corpus_and_says_which_are(tmp_path: Path) -> None:
    out = make(write(tmp_path / "x.jsonl", records(2)), tmp_path / "out", KEYS)
    with pytest.raises(ArgosyError) as refusal:
        open_corpus(out)
    assert str(out / "title") in refusal.value.fix
    assert str(out / "meta.body") in refusal.value.fix


def test_corpora_are_not_overwritten_unasked_and_go_when_asked(tmp_path: Path) -> None:
    source = write(tmp_path / "x.jsonl", records(2))
    out = make(source, tmp_path / "out", KEYS)
    with pytest.raises(ArgosyError) as refusal:
        make(source, out, KEYS)
    assert refusal.value.code == "data.output-exists"
    make(write(tmp_path / "y.jsonl", records(3)), out, KEYS, overwrite=True)
    assert open_corpus(out / "title").documents == open_corpus(out / "meta.body").documents == 3


@pytest.mark.parametrize(("name", "keys"), [("x.txt", KEYS), ("x.jsonl", ("title", "title"))])
def test_keys_that_cannot_be_are_refused(tmp_path: Path, name: str, keys: tuple[str, ...]) -> None:
    write(tmp_path / name, records(2))
    with pytest.raises(ArgosyError) as refusal:
        make(tmp_path / name, tmp_path / "out", keys)
    assert (refusal.value.code, refusal.value.key) == ("config.bad-value", "--key")
    assert not (tmp_path / "out").exists()


def test_a_key_never_leads_out_of_the_directory() -> None:
    names = [path.relative_to("out").as_posix() for path in corpora_of(Path("out"), ("a/b", "..", ".hidden", "é x"))]
    assert names == ["a%2Fb", "%2E.", "%2Ehidden", "%C3%A9%20x"]

"""No part of an input is left out in silence, and no file is taken twice: links, loops, special files, missing rights, two names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.data.corpus.verify import verify
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.remote import remote_inputs
from argosy.data.text.inputs import InputFile, find_inputs
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.errors import ArgosyError

RECORD = '{"text": "a b"}\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a directory with an input `ld` and a directory `other` that it may link to."""
    monkeypatch.chdir(tmp_path)
    for name in ("ld/real/a.jsonl", "other/b.jsonl"):
        write(name)


def write(name: str, text: str = RECORD) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def link(path: str, target: str) -> None:
    Path(path).symlink_to(target)


def paths(*names: str, report: Callable[[str], None] | None = None, as_text: bool = False) -> list[str]:
    return [file.path for file in find_inputs(names, report, as_text=as_text)]


def refused(*names: str, as_text: bool = False) -> ArgosyError:
    with pytest.raises(ArgosyError) as refusal:
        find_inputs(names, as_text=as_text)
    assert (refusal.value.code, bool(refusal.value.fix)) == ("data.bad-input", True)
    return refusal.value


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a directory unreadable, also for root."""
    scandir = os.scandir

    def close(name: str) -> None:
        def refusing(path: object = ".") -> object:
            if str(path) == name:
                raise PermissionError(13, "Permission denied", name)
            return scandir(path)  # type: ignore[call-overload]

        monkeypatch.setattr(os, "scandir", refusing)

    return close


@pytest.mark.parametrize("name", ["ld", "ld/**/*.jsonl", "ld/*/*.jsonl"])
def test_linked_directories_are_followed(name: str) -> None:
    link("ld/linked", "../other")
    assert paths(name) == ["ld/linked/b.jsonl", "ld/real/a.jsonl"]


def test_loops_and_links_to_the_same_directory_give_each_file_once() -> None:
    link("ld/self", ".")
    link("ld/latest", "real")
    link("ld/real/up", "../..")
    link("other/back", "../ld")
    link("ld/linked", "../other")
    link("ld/second", "../other")
    told: list[str] = []
    assert paths("ld", report=told.append) == ["ld/linked/b.jsonl", "ld/real/a.jsonl"]
    assert any("read already are skipped: 4, such as ld/latest" in text for text in told)
    assert any("above are not followed: 1, such as ld/real/up" in text for text in told)
    assert paths("ld/**/*.jsonl") == ["ld/linked/b.jsonl", "ld/real/a.jsonl"]


def test_a_link_above_is_not_followed_after_a_corpus_either() -> None:
    write("ld/a_corpus/manifest.json")
    link("ld/up", "..")
    assert paths("ld") == ["ld/real/a.jsonl"]


def test_a_file_behind_a_second_link_of_a_directory_is_taken_once_and_told() -> None:
    link("ld/0.jsonl", "real/a.jsonl")
    link("ld/out.jsonl", "../other/b.jsonl")
    # The layout of the Hub's cache: the content has no suffix.
    write("ld/blobs/0123")
    link("ld/snapshot.jsonl", "blobs/0123")
    told: list[str] = []
    expected = ["ld/out.jsonl", "ld/real/a.jsonl", "ld/snapshot.jsonl"]
    assert paths("ld", report=told.append) == expected
    assert paths("ld", as_text=True) == expected
    assert "ld: links to files that are taken already are skipped: 1, such as ld/0.jsonl" in told


def test_the_order_is_that_of_paths() -> None:
    for name in ("ld/real-2/a.jsonl", "ld/real/z.txt", "ld/b.jsonl", "ld/.hidden/c.jsonl", "ld/.d.jsonl", "ld/e.csv"):
        write(name)
    found = [path for path in Path("ld").rglob("*") if path.is_file()]
    known = sorted(p for p in found if p.suffix != ".csv" and not p.name.startswith("."))
    told: list[str] = []
    assert paths("ld", report=told.append) == list(map(str, known))
    assert told == ["ld: 2 files of other kinds are skipped, such as .d.jsonl"]
    assert paths("./ld/b.jsonl") == ["./ld/b.jsonl"]


@pytest.mark.parametrize("target", ["/nowhere/c.jsonl", "c.jsonl"])
def test_a_link_to_nowhere_is_refused_by_name(target: str) -> None:
    link("ld/c.jsonl", target)
    for name in ("ld", "ld/*.jsonl", "ld/**/*.jsonl", "ld/c.jsonl"):
        assert f"ld/c.jsonl is a link to {target}, which" in refused(name).cause
    assert paths("ld/**/a*.jsonl") == ["ld/real/a.jsonl"]


def test_a_linked_directory_that_is_gone_is_refused_and_the_lock_of_an_editor_is_not() -> None:
    link("ld/.#a.jsonl", "someone@host.123")
    assert paths("ld") == ["ld/real/a.jsonl"]
    link("ld/gone", "../gone")
    for name in ("ld", "ld/*/*.jsonl"):
        assert "ld/gone is a link to ../gone, which" in refused(name).cause


@pytest.mark.parametrize("name", ["ld", "ld/*.jsonl", "ld/c.jsonl"])
def test_a_fifo_is_refused_by_name(name: str) -> None:
    os.mkfifo("ld/c.jsonl")
    assert "ld/c.jsonl is a FIFO" in refused(name).cause


def test_a_special_file_of_another_kind_is_skipped_and_told() -> None:
    os.mkfifo("ld/pipe")
    told: list[str] = []
    assert paths("ld", report=told.append, as_text=True) == ["ld/real/a.jsonl"]
    assert told == ["ld: 1 files of other kinds are skipped, such as pipe"]


@pytest.mark.parametrize("name", ["ld", "ld/**/*.jsonl", "ld/*/*.jsonl"])
def test_a_directory_that_cannot_be_read_is_refused_by_name(closed: Callable[[str], None], name: str) -> None:
    write("ld/secret/c.jsonl")
    closed("ld/secret")
    assert refused(name).cause == "ld/secret cannot be read: Permission denied"


def test_lost_and_found_is_not_read(closed: Callable[[str], None]) -> None:
    Path("ld/lost+found").mkdir()
    closed("ld/lost+found")
    assert paths("ld") == ["ld/real/a.jsonl"]


def test_a_file_that_cannot_be_read_is_not_taken_for_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    write("ld/note.md")
    opened = Path.open

    def refusing(self: Path, *arguments: str) -> object:
        if self.name == "note.md":
            raise PermissionError(13, "Permission denied")
        return opened(self, *arguments)

    monkeypatch.setattr(Path, "open", refusing)
    assert refused("ld", as_text=True).cause == "ld/note.md cannot be read: Permission denied"


def test_directories_that_a_pattern_matches_are_told() -> None:
    write("ld/b.jsonl")
    told: list[str] = []
    assert paths("ld/*", report=told.append) == ["ld/b.jsonl"]
    assert told == ["ld/*: directories match, whose files do not: 1, such as ld/real; name them to read their files"]


@pytest.mark.parametrize(
    "second", ["ld/real/a.jsonl", "ld", "./ld/../ld/real/a.jsonl", "linked", "a-link.jsonl", "ld/*/*.jsonl"]
)
def test_a_file_that_is_named_twice_is_refused_with_both_names(second: str) -> None:
    link("linked", "ld/real")
    link("a-link.jsonl", "ld/real/a.jsonl")
    cause = refused("other", "ld", second).cause
    assert cause.startswith("ld/real/a.jsonl (from ld) and ")
    assert second in cause
    assert "are the same file" in cause


def test_an_absolute_path_and_a_file_url_are_other_spellings(tmp_path: Path) -> None:
    for second in (str(tmp_path / "ld"), f"file://{tmp_path}/ld/real/a.jsonl"):
        assert str(tmp_path / "ld" / "real" / "a.jsonl") in refused("ld", second).cause


def test_copies_and_hard_links_are_files_of_their_own() -> None:
    os.link("ld/real/a.jsonl", "ld/real/same.jsonl")
    assert paths("ld/real/a.jsonl", "ld/real/same.jsonl") == ["ld/real/a.jsonl", "ld/real/same.jsonl"]


def test_the_same_url_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_inputs, "find_remote", lambda name, report: [InputFile(name, 4, "ETag=1")])
    assert "are the same file" in refused("s3://bucket/a.jsonl", "s3://bucket/a.jsonl").cause
    assert "are the same file" in refused("https://host/a.jsonl", "https://HOST/a.jsonl").cause
    assert len(find_inputs(["s3://bucket/a.jsonl", "s3://bucket/A.jsonl"])) == 2


def test_a_corpus_of_linked_directories_verifies() -> None:
    link("ld/linked", "../other")
    made = prepare(["ld"], ByteTokenizer(), Path("out"), PrepareOptions(workers=1))
    assert made is not None
    assert [source.path for source in made[Path("out")].sources] == ["ld/linked/b.jsonl", "ld/real/a.jsonl"]
    assert not verify(Path("out")).faults

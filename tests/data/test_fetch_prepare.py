"""`argosy data fetch --prepare` prepares files as they arrive, and gives the same corpus as fetching first."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zstandard
from fetching import HASTE, TIMEOUT_S, loopback_hub  # noqa: F401
from loopback_hub import Hub
from meanwhile import when_reading

from argosy.data.corpus.corpus_manifest import Manifest
from argosy.data.fetch_prepare import fetch_and_prepare
from argosy.data.prepare import part_runner
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.remote.fetch import JOURNAL, Fetched, FetchOptions, fetch
from argosy.data.text.blocks import Piece
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.errors import ArgosyError
from forking import Popen
from waiting import PATIENCE_S, wait_for

REPO = "some/text"
FILES = 8


@pytest.fixture(autouse=True)
def _texts(hub: Hub) -> None:
    """Fill the Hub with files of every type except tables, with bad records among the good ones."""
    dice = random.Random(1)
    for number in range(FILES):
        lines = [json.dumps({"text": "word " * dice.randrange(1, 200) + str(i)}) for i in range(60)]
        lines[7], lines[30] = "{broken", json.dumps({"other": 1})
        content = ("\n".join(lines) + "\n").encode()
        kinds = {0: (".jsonl", content), 1: (".jsonl.gz", gzip.compress(content, mtime=0))}
        ending, stored = kinds.get(number % 3, (".jsonl.zst", zstandard.compress(content)))
        hub.files[REPO][f"train/{number:03d}{ending}"] = stored
    for number in range(5):
        hub.files[REPO][f"train/small-{number}.txt"] = b"a document of its own " * (number + 1)


def stream(
    raw: Path, corpus: Path, *, keep: bool = True, shards: int = 2, workers: int = 1, timeout_s: float = TIMEOUT_S
) -> tuple[Fetched, Manifest]:
    options = PrepareOptions(shards=shards, workers=workers)
    fetch_options = FetchOptions(workers=2, retry=HASTE, timeout_s=timeout_s)
    return fetch_and_prepare([REPO], raw, fetch_options, ByteTokenizer(), corpus, options, keep=keep)


def in_two_steps(raw: Path, corpus: Path, shards: int = 2) -> dict[str, bytes]:
    fetched = fetch([REPO], raw, FetchOptions(workers=2, retry=HASTE))
    prepare([file.path for file in fetched.files], ByteTokenizer(), corpus, PrepareOptions(shards=shards))
    return files_of(corpus)


def files_of(corpus: Path) -> dict[str, bytes]:
    """Return the files of a corpus without the versions of its sources: local files have a time, Hub files a hash."""
    return {path.name: re.sub(rb'"version": "[^"]+"', b"", path.read_bytes()) for path in corpus.iterdir()}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_corpus_is_the_one_that_fetching_first_gives(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool, workers: int
) -> None:
    monkeypatch.setattr(part_runner, "_INLINE_BYTES", 0)
    expected = in_two_steps(tmp_path / "raw", tmp_path / "expected")
    (tmp_path / "raw").rename(tmp_path / "fetched-first")
    fetched, manifest = stream(tmp_path / "raw", tmp_path / "corpus", keep=keep, workers=workers)
    assert files_of(tmp_path / "corpus") == expected
    assert manifest.documents == FILES * 58 + 5
    assert sum(manifest.quarantined.values()) == FILES * 2
    assert fetched.new_bytes == fetched.bytes == sum(map(len, hub.files[REPO].values()))
    assert all(file.sha256 for file in fetched.files)
    left = {path.name for path in (tmp_path / "raw").rglob("*") if path.is_file()}
    assert left == ({Path(file.path).name for file in fetched.files} if keep else set()) | {JOURNAL}


def test_a_file_is_prepared_while_the_next_ones_are_still_to_come(hub: Hub, tmp_path: Path) -> None:
    first_part = threading.Event()
    held = []

    def hold(handler: object, body: bytes, start: int) -> None:
        held.append(first_part.wait(PATIENCE_S))
        handler.answer(503)  # type: ignore[attr-defined]

    def watch() -> None:
        wait_for(lambda: list((tmp_path / "corpus" / ".parts").glob("00000-*.json")))
        first_part.set()

    hub.faults["007.jsonl.gz"] = [hold]
    watcher = threading.Thread(target=watch)
    watcher.start()
    stream(tmp_path / "raw", tmp_path / "corpus", timeout_s=2 * PATIENCE_S)
    watcher.join()
    assert held == [True]


def test_without_keeping_files_no_more_are_fetched_ahead_than_said(hub: Hub, tmp_path: Path) -> None:
    for number in range(40):
        hub.files["many/files"][f"train/{number:03d}.jsonl"] = json.dumps({"text": "a" * 50}).encode() + b"\n"
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, len(list((tmp_path / "raw").rglob("*.jsonl"))))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    options = FetchOptions(workers=2, retry=HASTE)
    fetch_and_prepare(
        ["many/files"], tmp_path / "raw", options, ByteTokenizer(), tmp_path / "corpus", PrepareOptions(), keep=False
    )
    done.set()
    watcher.join()
    # Prefetched files, the one being prepared, and the journal.
    assert 0 < most <= 2 * 2 + 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_cannot_come_ends_the_job_and_the_next_run_goes_on(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(part_runner, "_INLINE_BYTES", 0)
    expected = in_two_steps(tmp_path / "raw", tmp_path / "expected")
    (tmp_path / "raw").rename(tmp_path / "fetched-first")
    hub.faults["006.jsonl"] = [lambda handler, body, start: handler.answer(503)] * HASTE.attempts
    with pytest.raises(ArgosyError) as refusal:
        stream(tmp_path / "raw", tmp_path / "corpus", keep=False, workers=workers)
    assert refusal.value.code == "data.fetch-failed"
    assert not (tmp_path / "corpus" / "manifest.json").exists()
    before = len(hub.asked("/content/"))
    stream(tmp_path / "raw", tmp_path / "corpus", keep=False)
    assert files_of(tmp_path / "corpus") == expected
    # All its parts existed, so it was not fetched again.
    assert not [r for r in hub.asked("/content/")[before:] if "000.jsonl" in r.path]


def test_a_file_that_changes_after_it_arrived_is_refused(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[str] = []

    def change(piece: Piece) -> None:
        changed.append(piece.file)
        Path(piece.file).write_bytes(Path(piece.file).read_bytes().replace(b"word", b"wurd"))

    when_reading(monkeypatch, change)
    with pytest.raises(ArgosyError) as refusal:
        stream(tmp_path / "raw", tmp_path / "corpus")
    assert refusal.value.code == "data.input-changed"
    assert changed[0] in refusal.value.cause


def test_a_file_of_unknown_kind_is_refused_before_anything_is_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.plain["readme.html"] = b"<html>"
    with pytest.raises(ArgosyError) as refusal:
        fetch_and_prepare(
            [f"{hub.url}/plain/readme.html"], tmp_path / "raw", FetchOptions(retry=HASTE), ByteTokenizer(),
            tmp_path / "corpus", PrepareOptions(),
        )  # fmt: skip
    assert refusal.value.code == "data.bad-input"
    assert not (tmp_path / "raw").exists()


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # below a background job it would be ignored
from pathlib import Path
from argosy.data.fetch_prepare import fetch_and_prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.remote.fetch import FetchOptions
from argosy.data.text.tokenizer import ByteTokenizer
raw, corpus, keep = sys.argv[1:]
print("up", flush=True)
fetch_and_prepare(["some/text"], Path(raw), FetchOptions(workers=2, timeout_s=600), ByteTokenizer(), Path(corpus),
                  PrepareOptions(shards=2, workers=1), keep=keep == "keep")
"""


@pytest.mark.parametrize("keep", ["keep", "discard"])
def test_killed_again_and_again_the_bytes_are_the_same(hub: Hub, tmp_path: Path, keep: str) -> None:
    raw, corpus = tmp_path / "raw", tmp_path / "corpus"
    expected = in_two_steps(raw, tmp_path / "expected")
    raw.rename(tmp_path / "fetched-first")
    hub.pace = 0.03
    dice = random.Random(3)
    for _ in range(6):
        child = Popen([sys.executable, "-c", SCRIPT, str(raw), str(corpus), keep], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(dice.uniform(0.02, 0.5))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        if (corpus / "manifest.json").exists():
            break
    hub.pace = 0.0
    if not (corpus / "manifest.json").exists():
        stream(raw, corpus, keep=keep == "keep")
    # A kill may leave it behind a finished corpus.
    shutil.rmtree(corpus / ".parts", ignore_errors=True)
    assert {name: content for name, content in files_of(corpus).items() if not name.startswith(".")} == expected


def test_ctrl_c_ends_it_at_once_and_keeps_what_came(hub: Hub, tmp_path: Path) -> None:
    hub.faults["005.jsonl.zst"] = [lambda handler, body, start: time.sleep(600)]
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "raw"), str(tmp_path / "corpus"), "keep"]
    child = Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: hub.asked("/content/some/text//train/005"))
    child.send_signal(signal.SIGINT)
    # The process's own timeout for a silent server is longer than that.
    child.communicate(timeout=PATIENCE_S)
    assert child.returncode != 0
    assert len(list((tmp_path / "raw").rglob("00[0-4]*"))) >= 4

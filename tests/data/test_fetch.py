"""`argosy data fetch`: names resolve to the right files, finished files are kept, and a kill at any moment loses nothing."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path

import pytest
import typer
from fetching import C4, HASTE, go, loopback_hub, noise, one_file, refused, stored, wanted  # noqa: F401
from loopback_hub import Hub
from typer.testing import CliRunner

from argosy.cli import data_fetch
from argosy.data.remote import fetch as fetch_module
from argosy.data.remote.fetch import JOURNAL, Fetched, FetchJournal, FetchOptions, preview
from argosy.data.remote.sources import Choice, find_files, split_of, text_key
from argosy.data.remote.web import Web
from argosy.errors import ArgosyError


@pytest.mark.parametrize(
    ("name", "choice", "repo", "prefixes"),
    [
        ("c4", {}, C4, ["en/c4-train"]),
        ("c4", {"split": "val"}, C4, ["en/c4-validation"]),
        ("allenai/c4", {"config": "realnewslike"}, C4, ["realnewslike/"]),
        ("c4", {"split": "train_small,val_small"}, C4, ["en/c4-train.00000", "en/c4-validation.00000"]),
        ("c4", {"sample": 2}, C4, ["en/c4-train.00000", "en/c4-train.00001"]),
        ("slimpajama", {}, "cerebras/SlimPajama-627B", ["train/"]),
        ("slimpajama", {"sample": 3}, "cerebras/SlimPajama-627B", ["train/chunk1"]),
        ("cerebras/SlimPajama-627B", {"split": "validation"}, "cerebras/SlimPajama-627B", ["validation/"]),
        ("slimpajama", {"split": "test"}, "cerebras/SlimPajama-627B", ["test/"]),
        ("oscar", {"config": "de"}, "oscar-corpus/OSCAR-2301", ["de_meta/de_meta_part"]),
        ("hf://datasets/allenai/c4@main/en/c4-train.0000?-*.gz", {"sample": 4}, C4, [f"en/c4-train.0000{i}" for i in range(4)]),
        ("hf://datasets/allenai/c4/realnewslike", {}, C4, ["realnewslike/"]),
        ("hf://datasets/allenai/c4/**/*train.00003*", {}, C4, ["en/c4-train.00003", "realnewslike/c4-train.00003"]),
        ("hf://datasets/allenai/c4/en/notes.txt", {}, C4, ["en/notes.txt"]),
        ("{hub}/datasets/allenai/c4/resolve/main/en/notes.txt?download=true", {}, C4, ["en/notes.txt"]),
    ],
)  # fmt: skip
def test_a_name_stands_for_its_files(
    hub: Hub, tmp_path: Path, name: str, choice: dict[str, object], repo: str, prefixes: list[str]
) -> None:
    fetched = go(tmp_path, name.replace("{hub}", hub.url), **choice)
    assert stored(tmp_path) == wanted(hub, repo, *prefixes)
    for file in fetched.files:
        assert hashlib.sha256(Path(file.path).read_bytes()).hexdigest() == file.sha256


def test_the_sample_of_oscar_is_one_file_without_a_token(hub: Hub, tmp_path: Path) -> None:
    content = lzma.compress(b'{"text": "Words."}\n')
    hub.models["bigscience/misc-test-data/resolve/main/stas/oscar-1GB.jsonl.xz"] = content
    go(tmp_path, "oscar-1gb")
    assert (tmp_path / "oscar-1GB.jsonl.xz").read_bytes() == content
    assert text_key(["oscar-1gb"]) == "text"


def test_the_listing_is_the_one_the_hub_s_own_client_reads(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys; from huggingface_hub import HfApi; api = HfApi(endpoint=sys.argv[1], token=False)\n"
        "for f in api.list_repo_tree('allenai/c4', repo_type='dataset', path_in_repo='en', recursive=True):\n"
        "    print(f.path, f.size, f.lfs.sha256 if f.lfs else f.blob_id)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "0"}
    out = subprocess.run(
        [sys.executable, "-c", script, hub.url], env=environment, check=True, capture_output=True, text=True
    ).stdout
    theirs = sorted(out.splitlines())
    names = ["hf://datasets/allenai/c4/en"]
    ours = [f"{f.path} {f.size} {f.identity}" for f in find_files(names, Choice(), Web(HASTE), print)]
    assert sorted(ours) == theirs


@pytest.mark.parametrize(
    ("path", "split"),
    [("train/chunk1/example_holdout_0.jsonl", "train"), ("validation/x_test.jsonl", "validation"),
     ("data/dev-00000.parquet", "validation"), ("c4-af-validation.tfrecord-00000.json.gz", "validation"),
     ("en_meta_part_1.jsonl.zst", None), ("constraints.jsonl", None), ("TEST.jsonl", "test")],
)  # fmt: skip
def test_splits_are_read_from_names(path: str, split: str | None) -> None:
    assert split_of(path) == split


@pytest.mark.parametrize(
    ("name", "choice", "cause", "fix"),
    [
        ("c4", {"config": "eng"}, "did you mean en?", "en, realnewslike"),
        ("c4", {"split": "trian_small"}, "did you mean train_small?", "validation"),
        ("c4", {"revision": "v9"}, "no revision 'v9'", "branches"),
        ("oscar", {}, "many configs", "de_meta, fr_meta"),
        ("oscar", {"config": "ed"}, "no config 'ed'", "de_meta"),
        ("oscar", {"config": "de", "split": "test"}, "no split 'test'", "train"),
        ("slimpajama", {"split": "tests"}, "did you mean test?", "train, validation"),
        ("slimpyjama", {}, "did you mean slimpajama?", "owner/name"),
        ("nobody/nothing", {}, "there is no data set nobody/nothing", "HF_TOKEN"),
        ("hf://datasets/allenai/c4/fr", {}, "matches no file", "tree/main"),
        ("hf://datasets/allenai/c4/en", {"split": "train"}, "already says", "--split"),
        ("s3://bucket/x.jsonl", {}, "cannot be fetched", "prepare"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    hub: Hub, tmp_path: Path, name: str, choice: dict[str, object], cause: str, fix: str
) -> None:
    error = refused(tmp_path, name, **choice)
    assert error.code == "data.fetch-refused"
    assert cause in error.cause
    assert fix in error.fix


def test_finished_files_are_kept_and_changed_ones_fetched_again(hub: Hub, tmp_path: Path) -> None:
    go(tmp_path, "c4")
    first, second = sorted(tmp_path.glob("en/*train*"))[:2]
    hub.requests.clear()
    assert go(tmp_path, "c4").new_bytes == 0
    assert not hub.asked("/resolve/")
    # Someone else overwrites it.
    first.write_bytes(b"x" * 20_000)
    # Ensure a later time even if the clock of the file system has not advanced.
    os.utime(first, ns=(0, first.stat().st_mtime_ns + 1))
    # A new revision.
    hub.files[C4]["en/c4-train.00001-of-01024.json.gz"] = noise(100, 99)
    # Only touched.
    os.utime(sorted(tmp_path.glob("en/*train*"))[2])
    go(tmp_path, "c4")
    assert len(hub.asked("/content/")) == 2
    assert stored(tmp_path) == wanted(hub, C4, "en/c4-train")
    assert second.stat().st_size == 100


def test_files_of_others_are_not_overwritten(hub: Hub, tmp_path: Path) -> None:
    name, content = one_file(hub)
    (tmp_path / "big.jsonl.zst").write_bytes(b"my own")
    assert "was not fetched" in refused(tmp_path, name).cause
    # Copied by hand: accepted because its hash is right.
    (tmp_path / "big.jsonl.zst").write_bytes(content)
    assert go(tmp_path, name).new_bytes == 0
    hub.files["two/file"]["big.jsonl.zst"] = noise(10)
    assert "hf://datasets/one/file" in refused(tmp_path, "two/file").cause
    assert "both hold big.jsonl.zst" in refused(tmp_path / "new", "one/file", "two/file").cause
    assert stored(tmp_path) == {"big.jsonl.zst": content}


def test_too_little_space_is_refused_with_the_arithmetic(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda path: usage(0, 0, 90_000))
    (tmp_path / "en").mkdir()
    (tmp_path / "en/c4-train.00004-of-01024.json.gz.partial").write_bytes(noise(20_000, 4)[:1000])
    error = refused(tmp_path, "c4")
    assert "100,000 bytes, less 1,000 already there, need 99,000 more" in error.cause
    assert "9,000 too few" in error.cause
    assert not hub.asked("/resolve/")


def test_one_downloader_at_a_time_and_the_second_finds_the_work_done(hub: Hub, tmp_path: Path) -> None:
    hub.pace = 0.05
    results: list[Fetched] = []
    threads = [threading.Thread(target=lambda: results.append(go(tmp_path, "c4"))) for _ in range(3)]
    with FetchJournal(tmp_path):
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        assert not hub.requests
    for thread in threads:
        thread.join()
    assert sorted(result.new_bytes for result in results) == [0, 0, 100_000]
    assert len(hub.asked("/content/")) == 5


def sizes_of(files: Iterable[Path]) -> list[int]:
    """Return the sizes of files that are not empty. A file that was renamed meanwhile is left out."""
    sizes = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            sizes.append(file.stat().st_size)
    return [size for size in sizes if size]


def test_killed_at_any_moment_the_next_run_ends_with_the_same_bytes(hub: Hub, tmp_path: Path) -> None:
    hub.pace = 0.03
    # 0.75 s each.
    hub.files[C4] |= {name: noise(100_000, i) for i, name in enumerate(wanted(hub, C4, "en/c4-train"))}
    script = (
        "import sys; from pathlib import Path; from argosy import errors\n"
        "from argosy.data.remote.fetch import fetch, FetchOptions\n"
        "assert 'torch' not in sys.modules\n"
        "print('up', flush=True); fetch(['c4'], Path(sys.argv[1]), FetchOptions(workers=2))"
    )
    dice = random.Random(5)
    for kill in range(8):
        seen = len(hub.asked("/content/"))
        child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        while kill % 4 and child.poll() is None and len(hub.asked("/content/")) == seen:
            time.sleep(0.005)
        while kill == 1 and not sizes_of(tmp_path.rglob("*.partial")):
            # Once, wait for a partial file to resume from, however slow the machine is.
            time.sleep(0.005)
        time.sleep(dice.uniform(0.0, 0.3))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        whole = wanted(hub, C4, "en/c4-train")
        assert all(whole[name] == content for name, content in stored(tmp_path).items())
    with (tmp_path / JOURNAL).open("ab") as journal:
        # A kill may leave a truncated line.
        journal.write(b'{"path": "en/c4-tr')
    hub.pace = 0
    go(tmp_path, "c4")
    assert stored(tmp_path) == whole
    assert any("range" in request.headers for request in hub.asked("/content/"))
    assert go(tmp_path, "c4").new_bytes == 0


def test_a_preview_writes_nothing_and_gives_the_size(hub: Hub, tmp_path: Path) -> None:
    plan = preview(["c4"], tmp_path / "out", FetchOptions(Choice(sample=2), retry=HASTE))
    assert "2 files, 40,000 bytes (40" in plan.describe_plan()
    assert not (tmp_path / "out").exists()


def test_text_keys_follow_the_data_set() -> None:
    assert text_key(["oscar"]) == text_key(["hf://datasets/oscar-corpus/OSCAR-2301/de_meta"]) == "content"
    assert text_key(["c4", "https://x/y.jsonl"]) == "text"
    with pytest.raises(ArgosyError):
        text_key(["c4", "oscar"])


def test_the_verb_fetches_and_prepares(hub: Hub, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(data_fetch.fetch)
    run = CliRunner()
    lines = b"".join(json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(9))
    hub.files[C4]["en/c4-validation.00000-of-00008.json.gz"] = gzip.compress(lines)
    raw, corpus = str(tmp_path / "raw"), str(tmp_path / "corpus")
    common = ["c4", "--split", "val_small", "--output", raw]
    listed = run.invoke(app, [*common, "--dry-run", "--json"], catch_exceptions=False)
    assert [file["path"] for file in json.loads(listed.stdout)["files"]] == [
        f"{raw}/en/c4-validation.00000-of-00008.json.gz"
    ]
    assert not Path(raw).exists()
    with pytest.raises(ArgosyError, match="without --corpus"):
        run.invoke(app, [*common, "--prepare", "--tokenizer", "bytes"], catch_exceptions=False)
    options = ["--prepare", "--tokenizer", "bytes", "--corpus", corpus, "--json"]
    done = run.invoke(app, [*common, *options], catch_exceptions=False)
    assert sum(shard["documents"] for shard in json.loads(done.stdout)["corpus"]["shards"]) == 9
    assert "fetched" in run.invoke(app, [*common], catch_exceptions=False).stdout


@pytest.mark.parametrize("option", ["--key", "--shards", "--overwrite"])
def test_options_of_prepare_without_it_are_refused_not_ignored(option: str) -> None:
    with pytest.raises(ArgosyError) as caught:
        fetch_module.corpus_wanted(False, None, None, {option: "given"})
    assert (caught.value.code, caught.value.key) == ("config.conflict", option)
    assert fetch_module.corpus_wanted(False, None, None, {option: None}) is None

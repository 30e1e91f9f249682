"""Remote inputs give the same corpus as local ones, for every format, from real servers; refusals say what to do."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from fetching import HASTE, loopback_hub  # noqa: F401
from loopback_hub import Hub
from meanwhile import when_reading
from object_server import FaultyServer, azure_connection, azurite, from_buckets, moto, upload
from typer.testing import CliRunner
from web_server import WebServer, web_server

from argosy.cli.app import app
from argosy.data.corpus.corpus_manifest import read_manifest
from argosy.data.prepare import part_runner, work, workers
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.remote import remote_inputs, web_inputs
from argosy.data.remote.web import Web
from argosy.data.text.inputs import InputFile, find_inputs
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.data.text.train_tokenizer import train_tokenizer_on
from argosy.errors import ArgosyError
from argosy.extras import install_extra
from argosy.files import local_path


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file of every format, some of several blocks."""
    root, dice = tmp_path_factory.mktemp("remote") / "raw", random.Random(0)
    root.mkdir()

    def lines(count: int) -> bytes:
        return "".join(json.dumps({"text": f"{i} " + "é" * dice.randrange(90)}) + "\n" for i in range(count)).encode()

    (root / "a.jsonl").write_bytes(lines(30))
    (root / "b.jsonl.gz").write_bytes(gzip.compress(lines(30), mtime=0))
    (root / "c.json.gz").write_bytes(gzip.compress(lines(5), mtime=0))
    (root / "d.jsonl.zst").write_bytes(zstandard.compress(lines(30)))
    (root / "e.txt").write_bytes(b"a document\nof two lines")
    (root / "f.txt.gz").write_bytes(gzip.compress(b"another", mtime=0))
    (root / "g.txt.zst").write_bytes(zstandard.compress(b"a third"))
    table = pyarrow.table({"text": [f"row {i}" for i in range(30)], "other": list(range(30))})
    pyarrow.parquet.write_table(table, root / "h.parquet", row_group_size=10)
    return root


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set small blocks and short timeouts, remove proxies, and close the stores of other tests."""
    monkeypatch.setattr(work, "block_size", lambda files: 1 << 12)
    impatient = Web(HASTE)
    monkeypatch.setattr(web_inputs, "web", lambda: impatient)
    monkeypatch.setenv("no_proxy", "*")
    remote_inputs._store.cache_clear()
    yield
    remote_inputs._store.cache_clear()


def make(names: list[str], output: Path, **options: Any) -> dict[str, bytes]:
    """Prepare a corpus and return its shards."""
    assert prepare(names, ByteTokenizer(), output, PrepareOptions(**{"workers": 1, **options})) is not None
    return {path.name: path.read_bytes() for path in output.iterdir() if path.name.startswith("shard-")}


@pytest.fixture(scope="module")
def expected(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "block_size", lambda files: 1 << 12)
        return make([str(raw)], tmp_path_factory.mktemp("expected") / "corpus")


def refused(action: Callable[[], object]) -> ArgosyError:
    with pytest.raises(ArgosyError) as refusal:
        action()
    return refusal.value


# Object stores


@pytest.fixture(scope="module")
def s3(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Serve the files of `raw` below `raw/` in a bucket of a moto server."""
    s3fs = pytest.importorskip("s3fs", reason="pip install s3fs")
    pytest.importorskip("moto", reason="pip install 'moto[server]'")
    with moto(tmp_path_factory.mktemp("moto")) as port, pytest.MonkeyPatch.context() as patch:
        environment = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        for key, value in {**environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "no_proxy": "*"}.items():
            patch.setenv(key, value)
        direct = s3fs.S3FileSystem(skip_instance_cache=True)
        direct.mkdir("bucket")
        upload(direct, raw, "bucket/raw")
        yield direct


@pytest.fixture(scope="module")
def azure(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    adlfs = pytest.importorskip("adlfs", reason="pip install adlfs")
    if shutil.which("azurite-blob") is None:
        pytest.skip("azurite is not installed: npm install -g azurite")
    with azurite(tmp_path_factory.mktemp("azurite")) as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure_connection(port))
        direct = adlfs.AzureBlobFileSystem(connection_string=azure_connection(port), skip_instance_cache=True)
        direct.mkdir("box")
        upload(direct, raw, "box/raw")
        yield direct


@pytest.fixture
def google(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    shutil.copytree(raw, tmp_path / "buckets" / "ours" / "raw")
    server = FaultyServer(from_buckets(tmp_path / "buckets"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    # Otherwise each request looks for credentials of the machine.
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    yield server
    server.close()


def test_s3_inputs_of_every_format_give_the_local_corpus(
    s3: Any, raw: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    names = [f"s3://bucket/raw/{path.name}" for path in sorted(raw.iterdir())]
    assert make(["s3://bucket/raw"], tmp_path / "corpus") == expected
    assert find_inputs(["s3://bucket/raw/*"]) == find_inputs(["s3://bucket/raw/"]) == find_inputs(names)
    sources = read_manifest(tmp_path / "corpus").sources
    assert [source.path for source in sources] == names
    assert all(str(source.version).startswith("ETag=") for source in sources)


def test_s3_inputs_are_read_by_worker_processes(
    s3: Any, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_runner, "_INLINE_BYTES", 0)
    assert make(["s3://bucket/raw"], tmp_path / "corpus", workers=2) == expected


@pytest.mark.parametrize("change", ["replaced", "shorter", "removed"])
def test_an_object_that_changes_is_refused(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    content = b"".join(json.dumps({"text": f"word {i}"}).encode() + b"\n" for i in range(200))
    s3.pipe_file("bucket/changing.jsonl", content)

    def happen() -> None:
        if change == "removed":
            s3.rm_file("bucket/changing.jsonl")
        else:
            s3.pipe_file("bucket/changing.jsonl", content[::-1] if change == "replaced" else content[:3000])

    when_reading(monkeypatch, lambda _: happen())
    error = refused(lambda: make(["s3://bucket/changing.jsonl"], tmp_path / "corpus"))
    assert error.code == "data.input-changed"
    assert "s3://bucket/changing.jsonl changed while it was being prepared" in error.cause
    assert "no longer there" in error.cause if change == "removed" else " -> ETag=" in error.cause


def test_what_s3_has_not_is_refused_with_what_to_do(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("s3://bucket/nothing.jsonl", "s3://no-such-bucket/raw/a.jsonl"):
        error = refused(lambda name=name: find_inputs([name]))  # type: ignore[misc]
        assert (error.code, name in error.cause) == ("data.not-found", True)
    error = refused(lambda: find_inputs(["s3://bucket/raw/*.csv"]))
    assert (error.code, "s3://bucket/raw/*.csv" in error.cause) == ("data.bad-input", True)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    error = refused(lambda: find_inputs(["s3://bucket/raw/a.jsonl"]))
    assert (error.code, "AWS_ACCESS_KEY_ID" in error.fix) == ("data.fetch-failed", True)


def test_azure_inputs_of_every_format_give_the_local_corpus(
    azure: Any, expected: dict[str, bytes], tmp_path: Path
) -> None:
    assert make(["abfs://box/raw/*"], tmp_path / "corpus") == expected
    assert find_inputs(["az://box/raw"]) == find_inputs(["az://box/raw/*"])
    assert all("etag=" in str(source.version) for source in read_manifest(tmp_path / "corpus").sources)
    assert refused(lambda: find_inputs(["az://box/nothing.jsonl"])).code == "data.not-found"


def test_azure_without_credentials_is_refused_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    adlfs = pytest.importorskip("adlfs", reason="pip install adlfs")
    adlfs.AzureBlobFileSystem.clear_instance_cache()
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    error = refused(lambda: find_inputs(["az://box/raw/a.jsonl"]))
    assert (error.code, "AZURE_STORAGE_CONNECTION_STRING" in error.fix) == ("data.fetch-failed", True)


def test_google_inputs_of_every_format_give_the_local_corpus(
    google: FaultyServer, expected: dict[str, bytes], tmp_path: Path
) -> None:
    rest = iter(["short", "truncate", "long"])
    google.fault = lambda path: next(rest, None) if path.startswith("/download/") else None
    assert make(["gs://ours/raw"], tmp_path / "corpus") == expected
    assert set(google.faults) == {"short", "truncate", "long"}
    assert find_inputs(["gs://ours/raw"]) == find_inputs(["gs://ours/raw/*"])


def test_a_store_that_refuses_is_named_and_not_asked_again(google: FaultyServer, tmp_path: Path) -> None:
    google.fault = lambda path: "403" if path.startswith("/download/") else None
    error = refused(lambda: make(["gs://ours/raw/a.jsonl"], tmp_path / "corpus"))
    assert (error.code, google.faults["403"]) == ("data.fetch-failed", 1)
    assert "gs://ours/raw/a.jsonl cannot be read: OSError: Forbidden" in error.cause
    assert "GOOGLE_APPLICATION_CREDENTIALS" in error.fix


def test_an_unknown_kind_of_address_is_refused() -> None:
    error = refused(lambda: find_inputs(["ftps://host/a.jsonl"]))
    assert (error.code, "s3" in error.fix) == ("data.bad-input", True)


def test_where_only_a_local_path_will_do_an_address_is_refused(tmp_path: Path) -> None:
    verbs = [
        "inspect",
        "verify",
        "convert --output x",
        "merge --output x",
        "prepare in.jsonl --tokenizer bytes --output",
    ]
    for verb in [*verbs, "prepare in.jsonl --output x --tokenizer"]:
        ended = CliRunner().invoke(app, ["data", *verb.split(), "s3://bucket/corpus"])
        assert isinstance(ended.exception, ArgosyError), verb
        assert "s3://bucket/corpus is remote" in ended.exception.cause
    assert local_path("file:///a/b") == Path("/a/b")
    assert local_path(tmp_path / "x") == tmp_path / "x"


def test_a_file_url_is_a_local_path(raw: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    assert make([f"file://{raw}"], tmp_path / "corpus") == expected


# Web servers

SERVERS: dict[str, dict[str, Any]] = {
    "static": {"content_type": "application/json"},
    "no-type": {"etag": False, "time": True},
    "no-head": {"methods": ("GET",)},
    "no-ranges": {"ranges": False, "content_type": "text/plain; charset=latin-1"},
    "no-validator": {"etag": False},
    "chunked": {"ranges": False, "length": "chunked"},
    "closed": {"ranges": False, "length": "closed", "etag": False},
    "gzip": {"encoding": "gzip", "content_type": "application/json"},
    "gzip-chunked": {"encoding": "gzip", "ranges": False, "length": "chunked"},
}


def urls(server: WebServer, raw: Path, *, encoded: bool = False) -> list[str]:
    """Return the URLs of the files. `encoded` leaves out .gz files, whose Content-Encoding servers take for the file itself."""
    return [f"{server.url}/{path.name}" for path in sorted(raw.iterdir()) if not (encoded and path.suffix == ".gz")]


@pytest.mark.parametrize("kind", SERVERS)
def test_web_inputs_of_every_format_give_the_local_corpus(raw: Path, tmp_path: Path, kind: str) -> None:
    encoded = "encoding" in SERVERS[kind]
    with web_server(raw, **SERVERS[kind]) as server:
        names = urls(server, raw, encoded=encoded)
        local = make([str(raw / name.rpartition("/")[2]) for name in names], tmp_path / "local")
        assert make(names, tmp_path / "corpus") == local
        assert all(source.version for source in read_manifest(tmp_path / "corpus").sources)


@pytest.mark.parametrize("ranges", [True, False])
def test_web_inputs_are_read_by_worker_processes(
    raw: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    monkeypatch.setattr(part_runner, "_INLINE_BYTES", 0)
    with web_server(raw, ranges=ranges) as server:
        assert make(urls(server, raw), tmp_path / "corpus", workers=2) == expected
        whole = [path for _, path in server.asked]
    if not ranges:
        assert sorted(whole) == sorted(f"/{path.name}" for path in raw.iterdir())


@pytest.mark.parametrize("shown", [True, False])
def test_a_worker_process_shows_notes_as_its_parent_does(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], shown: bool
) -> None:
    monkeypatch.setattr(part_runner, "_INLINE_BYTES", 0)
    monkeypatch.setattr(workers, "has_log_handler", lambda: shown)
    with web_server(raw, faults=["", "429"]) as server:  # the parent asks first, then a worker
        make([f"{server.url}/a.jsonl"], tmp_path / "corpus", workers=2)
    assert ("note: " in (said := capfd.readouterr().err), "the server asks to wait 0 s" in said) == (shown, shown)


def test_a_gzip_file_that_the_server_calls_encoded_is_the_file(raw: Path, tmp_path: Path) -> None:
    local = make([str(raw / "a.jsonl")], tmp_path / "local")
    (tmp_path / "served").mkdir()
    shutil.copy(raw / "a.jsonl", tmp_path / "served" / "a.jsonl.gz")
    with web_server(tmp_path / "served", encoding="gzip") as server:
        assert make([f"{server.url}/a.jsonl.gz"], tmp_path / "corpus") == local


def test_an_index_page_is_listed_and_matched(raw: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="pip install 'argosy[remote]'")
    with web_server(raw, methods=("GET", "HEAD")) as server:
        assert make([f"{server.url}/"], tmp_path / "page") == expected
        found = [file.path for file in find_inputs([f"{server.url}/*.jsonl*"])]
        assert found == [f"{server.url}/{name}" for name in ("a.jsonl", "b.jsonl.gz", "d.jsonl.zst")]


@pytest.mark.parametrize("habits", [{}, {"ranges": False}, {"ranges": False, "length": "chunked"}, SERVERS["closed"]])
def test_broken_connections_are_tried_again(raw: Path, tmp_path: Path, habits: dict[str, Any]) -> None:
    with web_server(raw, **habits, faults=["503", "reset", "cut", "429", "slow"]) as server:
        local = make([str(raw / "a.jsonl")], tmp_path / "local")
        assert make([f"{server.url}/a.jsonl"], tmp_path / "corpus") == local
        assert not server.habits.faults


@pytest.mark.parametrize(
    ("fault", "code"), [("503", "data.fetch-failed"), ("cut", "data.fetch-failed"), ("reset", "data.fetch-failed")]
)
def test_a_server_that_keeps_failing_is_refused_with_the_url(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, code: str
) -> None:
    with web_server(raw) as server:
        when_reading(monkeypatch, lambda _: server.habits.faults.extend([fault] * 50))
        error = refused(lambda: make([f"{server.url}/a.jsonl", f"{server.url}/d.jsonl.zst"], tmp_path / "corpus"))
    assert error.code == code
    assert server.url in error.cause


@pytest.mark.parametrize(("status", "code"), [("404", "data.not-found"), ("403", "data.fetch-failed")])
def test_what_a_server_does_not_give_is_refused_at_once(raw: Path, status: str, code: str) -> None:
    with web_server(raw, faults=[status]) as server:
        error = refused(lambda: find_inputs([f"{server.url}/a.jsonl"]))
        assert len(server.asked) == 1
    assert (error.code, f"{server.url}/a.jsonl" in error.cause, status in error.cause) == (code, True, True)


@pytest.mark.parametrize("change", ["rewritten", "shorter", "removed"])
@pytest.mark.parametrize("habits", [{}, {"etag": False, "time": True}])
def test_a_web_input_that_changes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, habits: dict[str, Any]
) -> None:
    (tmp_path / "served").mkdir()
    file = tmp_path / "served" / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"word {i}"}) + "\n" for i in range(200)))

    def happen() -> None:
        if change == "removed":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes().replace(b"word", b"wurd")[: 3000 if change == "shorter" else None])

    with web_server(tmp_path / "served", **habits) as server:
        when_reading(monkeypatch, lambda _: happen())
        error = refused(lambda: make([f"{server.url}/a.jsonl"], tmp_path / "corpus"))
        assert error.code == "data.input-changed"
        assert f"{server.url}/a.jsonl" in error.cause


def test_brackets_of_a_host_are_no_pattern(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def find(url: str, report: object) -> InputFile:
        asked.append(url)
        return InputFile(url, 0)

    monkeypatch.setattr(web_inputs, "_find", find)
    find_inputs(["http://[::1]:8000/a.jsonl"])
    assert asked == ["http://[::1]:8000/a.jsonl"]


def test_a_query_is_not_kept_in_a_corpus(raw: Path) -> None:
    error = refused(lambda: find_inputs(["https://host/a.jsonl?signature=secret"]))
    assert error.code == "data.bad-input"
    assert "secret" not in str(error).replace("may hold a secret", "")


def test_inputs_of_the_hub_are_read_at_one_commit(
    hub: Hub, raw: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = Web(HASTE)
    monkeypatch.setattr(web_inputs, "web", lambda: impatient)
    for path in raw.iterdir():
        hub.files["some/set"][f"data/{path.name}"] = path.read_bytes()
    assert make(["hf://datasets/some/set/data"], tmp_path / "corpus") == expected
    [first, *_] = read_manifest(tmp_path / "corpus").sources
    assert first.path == "hf://datasets/some/set/data/a.jsonl"
    assert str(first.version).startswith("hash=")


def test_a_tokenizer_is_trained_on_remote_inputs(raw: Path, tmp_path: Path) -> None:
    with web_server(raw) as server:
        train_tokenizer_on([f"{server.url}/a.jsonl"], 270, tmp_path / "remote.json", ["text"], overwrite=False)
    train_tokenizer_on([str(raw / "a.jsonl")], 270, tmp_path / "local.json", ["text"], overwrite=False)
    assert (tmp_path / "remote.json").read_bytes() == (tmp_path / "local.json").read_bytes()


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    error = refused(lambda: find_inputs(["s3://bucket/a.jsonl"]))
    assert (error.code, install_extra("remote") in error.fix) == ("data.missing-extra", True)

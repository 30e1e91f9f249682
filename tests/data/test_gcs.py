"""Google Cloud Storage through gcsfs, against a loopback server of its JSON API: streaming, prepare, refusals."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from corpora import write_corpus
from object_server import FaultyServer, from_buckets
from stream_reader import batches, patient

from argosy.data.corpus.corpus import open_corpus
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.remote.objects import ObjectStore
from argosy.data.remote.stream import open_streamed
from argosy.data.text.inputs import find_inputs
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.errors import ArgosyError
from argosy.extras import install_extra


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """Serve the directories of tmp_path / "buckets" as buckets."""
    (tmp_path / "buckets" / "ours").mkdir(parents=True)
    server = FaultyServer(from_buckets(tmp_path / "buckets"))
    # With this variable gcsfs looks for no credentials.
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    monkeypatch.setenv("no_proxy", "*")
    yield server
    server.close()


def test_a_corpus_in_a_bucket_is_read_like_a_local_one_whatever_goes_wrong(
    google: FaultyServer, tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    shards = [[[rng.integers(0, 256, 90_000).tolist()] for _ in range(8)] for _ in range(2)]
    local = write_corpus(tmp_path / "buckets" / "ours" / "sets" / "corpus", shards, blocks=True)
    store = patient("gs://ours/sets/corpus")
    corpus = open_streamed("gs://ours/sets/corpus", tmp_path / "cache", 3 << 20, store=store)
    rest = iter(["500", "short", "429", "truncate", "long"])
    google.fault = lambda path: next(rest, None) if path.startswith("/download/") else None
    assert batches(corpus, announce=60) == batches(open_corpus(local))
    assert set(google.faults) == {"500", "short", "429", "truncate", "long"}
    corpus.close()


def test_prepare_reads_the_files_of_a_bucket(google: FaultyServer, tmp_path: Path) -> None:
    for number in range(3):
        file = tmp_path / "buckets" / "ours" / "raw" / f"{number}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps({"text": f"document {number} {i}"}) + "\n" for i in range(10)))
    assert [f.path for f in find_inputs(["gs://ours/raw/*.jsonl"])] == [f"gs://ours/raw/{i}.jsonl" for i in range(3)]
    made = prepare(["gs://ours/raw"], ByteTokenizer(), tmp_path / "corpus", PrepareOptions(workers=1))
    assert made is not None
    assert [manifest.documents for manifest in made.values()] == [30]


def test_what_is_not_there_is_refused(google: FaultyServer, tmp_path: Path) -> None:
    with pytest.raises(ArgosyError) as refusal:
        open_streamed("gs://ours/nowhere", tmp_path / "cache")
    assert (refusal.value.code, refusal.value.cause) == (
        "data.not-found",
        "there is no gs://ours/nowhere/manifest.json",
    )


def test_without_its_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "gcsfs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "gs", raising=False)
    for attempt in (lambda: ObjectStore("gs://ours/corpus"), lambda: find_inputs(["gs://ours/raw/*.jsonl"])):
        with pytest.raises(ArgosyError) as refusal:
            attempt()
        assert refusal.value.code == "data.missing-extra"
        assert install_extra("remote") in refusal.value.fix

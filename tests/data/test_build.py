"""`argosy data build` makes the corpora of a run spec once, in one process or several, and never twice."""

from __future__ import annotations

import errno
import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from fetching import HASTE, loopback_hub  # noqa: F401 - a fixture
from loopback_hub import Hub
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.cli.data_build import Only
from argosy.cli.data_build import build as build_command
from argosy.config.resolve import resolve
from argosy.data.build_corpora import Share, build, share_of
from argosy.data.chat.chat_template import chat_format
from argosy.data.corpus.corpus_manifest import read_manifest
from argosy.data.curate import curate_report
from argosy.data.curate.curate_work import REPORT_FILE
from argosy.data.remote.fetch import FetchOptions, fetch
from argosy.data.remote.sources import Choice
from argosy.data.text.tokenizer import load_tokenizer, train_bpe
from argosy.errors import EXIT_RESUMABLE, ArgosyError
from argosy.files import replace_file
from argosy.launch.place import place as place_run


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """Write run specs whose corpus is made from a file of 50 documents."""
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "document {n} says {n * n}"}}\n' for n in range(50)))

    def write(**keys: Any) -> Path:
        made: dict[str, Any] = {"inputs": [str(tmp_path / "text.jsonl")], "shards": 3}
        source = {"path": str(tmp_path / "corpus"), "prepare": made} | keys
        spec = {
            "model": {"family": "llama", "layers": 1, "hidden": 16, "heads": 2, "vocab_size": 257},
            "data": {"tokenizer": "bytes", "train": [source], "seq_len": 16},
            "train": {"global_batch": 2, "steps": 2},
            "optim": {"lr": 1e-3},
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(spec))
        return path

    return write


def test_several_workers_make_the_corpus_that_one_makes(recipe: Callable[..., Path], tmp_path: Path) -> None:
    spec = resolve(recipe()).spec
    for index in (1, 0):
        said = list(build(spec, Share(index, 2), "prepare"))
    assert "50 documents" in said[-1]
    shared = {path.name: path.read_bytes() for path in (tmp_path / "corpus").glob("shard-*")}
    alone = resolve(recipe(path=str(tmp_path / "alone"))).spec
    list(build(alone, Share()))
    assert shared == {path.name: path.read_bytes() for path in (tmp_path / "alone").glob("shard-*")}


@pytest.mark.parametrize("from_file", [False, True])
def test_a_corpus_is_curated_by_several_workers_as_by_one(
    recipe: Callable[..., Path], tmp_path: Path, from_file: bool
) -> None:
    steps: Any = [{"length": {"min_characters": 20}}, "exact_duplicates"]
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(yaml.safe_dump({"inputs": ["other"], "output": "other", "steps": steps}))
    inputs = tmp_path / "text.jsonl"
    made = {"inputs": [str(inputs)], "shards": 3, "curate": str(pipeline) if from_file else steps}
    spec = resolve(recipe(prepare=made)).spec
    with inputs.open("a") as file:
        file.write('{"text": "document 49 says 2401"}\n')
    for index in (1, 0):
        said = list(build(spec, Share(index, 2), "prepare"))
    # Documents 10 to 49 have 20 characters or more, and one is there twice.
    assert read_manifest(tmp_path / "corpus").documents == 40
    assert said == [f"{tmp_path / 'corpus'}: already exists"]
    alone = resolve(recipe(path=str(tmp_path / "alone"), prepare=made)).spec
    assert "exact_duplicates" in next(build(alone, Share()))
    shared, one = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.suffix in (".bin", ".idx")}
        for name in ("corpus", "alone")
    )
    assert shared == one
    assert len(one) == 6


def test_without_locks_a_worker_that_others_have_to_finish_asks_to_be_run_again(
    recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"inputs": [str(tmp_path / "text.jsonl")], "shards": 2, "curate": ["exact_duplicates"]}
    path = recipe(prepare=made)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setenv("ARGOSY_WORKERS", "2")

    def code_of(index: int) -> int:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        try:
            build_command([str(path)], Only.prepare)
        except typer.Exit as end:
            return end.exit_code
        return 0

    assert [code_of(index) for index in (0, 1, 0, 1)] == [EXIT_RESUMABLE, EXIT_RESUMABLE, 0, 0]


def test_a_curation_that_was_killed_before_its_report_gets_it_from_the_next_build(
    recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = resolve(recipe(prepare={"inputs": [str(tmp_path / "text.jsonl")], "curate": ["exact_duplicates"]})).spec

    def die(path: Path, content: bytes, **options: Any) -> None:
        if path.name == REPORT_FILE:
            raise KeyboardInterrupt
        replace_file(path, content, **options)

    with monkeypatch.context() as patch:
        patch.setattr(curate_report, "replace_file", die)
        with pytest.raises(KeyboardInterrupt):
            list(build(spec, Share()))
    assert (tmp_path / "corpus" / "manifest.json").exists()
    list(build(spec, Share()))
    assert (tmp_path / "corpus" / REPORT_FILE).exists()
    assert not (tmp_path / "corpus" / ".parts").exists()


@pytest.mark.parametrize(
    ("keys", "place", "message"),
    [
        ({"shuffle": 1}, "shuffle", "leave shuffle out"),
        ({"as_text": True}, "as_text", "leave as_text out"),
        ({}, "curate.0", "did you mean length?"),
        ({"curate": ["exact_duplicates", "length"]}, "curate", "put length before"),
        ({"curate": ""}, "curate", "leave curate out"),
    ],
)
def test_a_wrong_curation_is_refused_before_anything_is_launched(
    recipe: Callable[..., Path], keys: dict[str, Any], place: str, message: str
) -> None:
    path = recipe(prepare={"inputs": ["x"], "curate": ["lenght"], **keys})
    with pytest.raises(ArgosyError) as refused:
        place_run(path, ["cluster={target: slurm, gpus: 0, ranks: 1, nodes: 1}"])
    assert message in refused.value.fix
    assert refused.value.key == f"data.train.0.prepare.{place}"


def test_a_tokenizer_of_the_hub_is_fetched_once_and_stays_at_its_commit(
    recipe: Callable[..., Path], tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    vocabulary = train_bpe(["document says 1 2 3"] * 10, 300)
    hub.files["openai/small"] |= {"tokenizer.json": vocabulary.encode(), "model.safetensors": b"not wanted"}
    hub.files["openai/small"]["chat_template.jinja"] = b"{{ messages }}"
    spec = resolve(recipe(), ["data.tokenizer=hf:openai/small"]).spec
    with pytest.raises(ArgosyError, match="cannot be read") as refused:
        list(build(spec, Share(), "prepare"))
    assert "--only fetch" in refused.value.fix
    assert not list(build(spec, Share(1, 2), "fetch")), "one worker fetches it"
    [said] = build(spec, Share(0, 2), "fetch")
    directory = Path("tokenizers/hf/openai--small")
    assert "tokenizer.json, chat_template.jinja of openai/small at commit" in said
    assert chat_format("hf:openai/small", None).template == "{{ messages }}"
    assert not (directory / "model.safetensors").exists()
    hub.files["openai/small"]["tokenizer.json"] = b"changed since"
    assert "already there" in next(build(spec, Share(), "fetch"))
    list(build(spec, Share(), "prepare"))
    pinned = load_tokenizer("hf:openai/small").fingerprint
    assert read_manifest(tmp_path / "corpus").tokenizer.fingerprint == pinned
    hub.files["openai/none"] |= {"config.json": b"{}"}
    with pytest.raises(ArgosyError, match=r"openai/none has no tokenizer.json"):
        list(build(resolve(recipe(), ["data.tokenizer=hf:openai/none"]).spec, Share(), "fetch"))


def test_prepare_fetches_a_tokenizer_of_the_hub_and_prints_nothing_but_json(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"text": "document says 1 2 3"}')
    hub.files["openai/small"] |= {"tokenizer.json": train_bpe(["document says 1 2 3"] * 10, 300).encode()}
    done = CliRunner().invoke(app, ["data", "prepare", "in.jsonl", "--tokenizer", "hf:openai/small", "--output", "new", "--json"])  # fmt: skip
    made = json.loads(done.stdout)
    assert made["tokenizer"]["fingerprint"] == load_tokenizer("hf:openai/small").fingerprint
    assert "tokenizer.json of openai/small at commit" in done.stderr


def test_fetching_needs_no_tokenizer(recipe: Callable[..., Path]) -> None:
    spec = resolve(recipe(), ["data.tokenizer=nowhere/tokenizer.json"]).spec
    assert not list(build(spec, Share(), "fetch"))


def test_a_corpus_with_a_manifest_is_left_alone(recipe: Callable[..., Path], tmp_path: Path) -> None:
    spec = resolve(recipe()).spec
    list(build(spec, Share()))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").iterdir()}
    assert list(build(spec, Share())) == [f"{tmp_path / 'corpus'}: already exists"]
    assert list(build(spec, Share(), "fetch")) == [f"{tmp_path / 'corpus'}: already exists"]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").iterdir()}


def test_a_marker_is_no_manifest(recipe: Callable[..., Path], tmp_path: Path) -> None:
    """A marker file such as `.complete` does not make a directory a finished corpus."""
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / ".complete").touch()
    list(build(resolve(recipe()).spec, Share()))
    assert read_manifest(tmp_path / "corpus").documents == 50


def test_another_tokenizer_is_refused(recipe: Callable[..., Path], tmp_path: Path) -> None:
    path = recipe()
    list(build(resolve(path).spec, Share()))
    manifest = tmp_path / "corpus" / "manifest.json"
    stored = read_manifest(tmp_path / "corpus").tokenizer.fingerprint
    manifest.write_text(manifest.read_text().replace(stored, "0" * len(stored)))
    with pytest.raises(ArgosyError, match="prepared with tokenizer 0000") as refused:
        list(build(resolve(path).spec, Share()))
    assert refused.value.code == "tokenizer.mismatch"


@pytest.mark.parametrize(
    ("prepare", "path", "key"),
    [
        ({"shards": 2}, "corpus", "fetch"),
        ({"fetch": "c4", "inputs": ["a"]}, "corpus", "fetch"),
        ({"inputs": ["a"], "split": "train"}, "corpus", "split"),
        ({"inputs": ["a"]}, "s3://bucket/corpus", "path"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(
    recipe: Callable[..., Path], prepare: dict[str, Any], path: str, key: str
) -> None:
    cache = {"cache": "/tmp/cache"} if "://" in path else {}
    with pytest.raises(ArgosyError) as refused:
        resolve(recipe(prepare=prepare, path=path, **cache))
    assert (refused.value.key or "").endswith(key)


def test_workers_are_numbered_as_kubernetes_and_slurm_number_them() -> None:
    assert share_of({}) == Share()
    assert share_of({"JOB_COMPLETION_INDEX": "1", "ARGOSY_WORKERS": "3"}) == Share(1, 3)
    assert share_of({"SLURM_ARRAY_TASK_ID": "2", "ARGOSY_WORKERS": "3"}) == Share(2, 3)
    with pytest.raises(ArgosyError):
        share_of({"JOB_COMPLETION_INDEX": "3", "ARGOSY_WORKERS": "3"})


def test_fetching_is_shared_by_files_and_any_number_of_workers_may_go_on(hub: Hub, tmp_path: Path) -> None:
    def go(index: int, count: int) -> tuple[list[str], int]:
        options = FetchOptions(Choice("en", "train"), 2, HASTE, machine=index, machines=count)
        done = fetch(["c4"], tmp_path / "raw", options)
        return [file.path for file in done.files], done.new_bytes

    first, second = go(0, 2), go(1, 2)
    assert len(first[0]) == 3
    assert len(second[0]) == 2
    assert not set(first[0]) & set(second[0])
    assert go(0, 2)[1] == 0
    # With fewer workers later, existing files are recognised by their hash.
    files, new = go(0, 1)
    assert len(files) == 5
    assert new == 0

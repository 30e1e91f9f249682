"""A stranger's model directory gives away no file of the user, holds nothing up, and is refused in words where its weights or
its tokenizer would fail later."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from argosy.checkpoint.hf.hf_export import ExportOptions, export_hf
from argosy.checkpoint.hf.hf_files import open_hf
from argosy.checkpoint.hf.hf_import import import_hf
from argosy.checkpoint.manifest import read_checkpoint
from argosy.checkpoint.source import open_source
from argosy.config.start import stored_description
from argosy.data.corpus.corpus_manifest import read_manifest
from argosy.data.corpus.indexed import IndexedReader
from argosy.data.text.tokenizer import load_tokenizer
from argosy.errors import ArgosyError
from argosy.infer.generate import sample
from argosy.infer.loading import load_model
from argosy.model.decoding import Sampling
from argosy.record.heartbeat import read_heartbeats
from argosy.record.tail import Tail
from argosy.untrusted import read_regular
from argosy.watch.log_causes import end_of_log, from_logs
from argosy.watch.run_list import Run, is_held
from hf_models import save

SECRET = "root:$6$a-hash-that-nobody-else-may-read"
pytestmark = pytest.mark.timeout(300)  # a FIFO that is opened waits for ever


def tokenizer(pattern: str | None = None) -> str:
    engine = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace() if pattern is None else pre_tokenizers.Split(Regex(pattern), "isolated")  # fmt: skip
    return str(engine.to_str())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    save("llama", path)
    (path / "tokenizer.json").write_text(tokenizer())
    (path / "special_tokens_map.json").write_text("{}")
    return path


@pytest.fixture
def hf(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "hf"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "shadow"
    path.write_text(json.dumps({"secret": SECRET}))
    path.chmod(0o600)
    return path


def refusal(work: Callable[[], object]) -> ArgosyError:
    with pytest.raises(ArgosyError) as refused:
        work()
    assert SECRET not in str(refused.value)
    return refused.value


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "merges.txt",
)


@pytest.mark.parametrize("name", [*SIDE_FILES, "config.json", "model.safetensors"])
def test_a_link_out_of_the_directory_is_refused(name: str, hf: Path, secret: Path, tmp_path: Path) -> None:
    link(hf / "a link to a link", secret)
    link(hf / "a directory", tmp_path)
    relative, through = Path("..") / secret.name, Path("a directory") / secret.name
    for target in (secret, hf / "a link to a link", relative, through):
        link(hf / name, target)
        error = refusal(lambda: import_hf(f"hf:{hf}", tmp_path / "ours"))
        assert error.code == "hf.bad-files"
        assert name in error.cause
        assert "outside" in error.cause
        assert not (tmp_path / "ours").exists()


def test_an_export_does_not_follow_a_link_planted_in_a_model(hf: Path, secret: Path, tmp_path: Path) -> None:
    import_hf(f"hf:{hf}", tmp_path / "ours")
    link(tmp_path / "ours" / "added_tokens.json", secret)
    error = refusal(lambda: export_hf(str(tmp_path / "ours"), tmp_path / "out", ExportOptions(verify=False)))
    assert "added_tokens.json" in error.cause
    assert not (tmp_path / "out").exists()


def cached(hf: Path, cache: Path) -> Path:
    """The same files as the Hub's cache keeps them."""
    repository = cache / "models--someone--something"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(hf.iterdir())):
        blob = blobs / f"{number:040x}"
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    return snapshot


def test_the_hubs_cache_and_links_within_the_directory_are_followed(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached(hf, tmp_path / "hub")
    assert import_hf(f"hf:{snapshot}", tmp_path / "from-cache").tokenizer
    (tmp_path / "current").symlink_to(snapshot)
    assert import_hf(f"hf:{tmp_path / 'current'}", tmp_path / "by-name").tokenizer
    for name in ("model.safetensors", "tokenizer.json"):
        (hf / name).rename(hf / f"really-{name}")
        link(hf / name, Path(f"really-{name}"))
    assert import_hf(f"hf:{hf}", tmp_path / "within").tokenizer
    # Older versions of `hf download --local-dir` leave links into the user's own cache, and nobody else's.
    local = tmp_path / "local"
    local.mkdir()
    for path in snapshot.iterdir():
        (local / path.name).symlink_to(path.resolve())
    assert "outside" in refusal(lambda: open_hf(local)).cause
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert import_hf(f"hf:{local}", tmp_path / "from-local").tokenizer


@pytest.mark.parametrize("plant", ["a blob that is a link", "blobs that are a link"])
def test_a_cache_whose_blobs_lead_elsewhere_is_refused(plant: str, hf: Path, secret: Path, tmp_path: Path) -> None:
    snapshot = cached(hf, tmp_path / "hub")
    blobs = snapshot.parents[1] / "blobs"
    if plant == "a blob that is a link":
        link(blobs / os.readlink(snapshot / "generation_config.json").rpartition("/")[2], secret)
    else:
        blobs.rename(tmp_path / "elsewhere")
        blobs.symlink_to(tmp_path / "elsewhere")
    assert "outside" in refusal(lambda: import_hf(f"hf:{snapshot}", tmp_path / "ours")).cause


def test_a_copy_is_no_more_readable_than_the_original_and_the_umask_say(hf: Path, tmp_path: Path) -> None:
    (hf / "tokenizer.json").chmod(0o600)
    before = os.umask(0o027)
    try:
        import_hf(f"hf:{hf}", tmp_path / "ours")
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((tmp_path / "ours" / name).stat().st_mode) for name in ("tokenizer.json", "special_tokens_map.json")}  # fmt: skip
    assert modes == {"tokenizer.json": 0o600, "special_tokens_map.json": 0o640}


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    here = os.open(path.parent, os.O_RDONLY)
    try:  # the name of a socket is short
        listener.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)
        listener.close()


KINDS: dict[str, Callable[[Path], Any]] = {
    "a FIFO": make_fifo,
    "a directory": Path.mkdir,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json", "chat_template.jinja"])  # fmt: skip
def test_what_is_no_regular_file_is_refused_before_it_is_opened(name: str, kind: str, hf: Path, tmp_path: Path) -> None:
    if name == "model.safetensors.index.json":
        (hf / "model.safetensors").unlink()
    (hf / name).unlink(missing_ok=True)
    KINDS[kind](hf / name)
    error = refusal(lambda: import_hf(f"hf:{hf}", tmp_path / "ours"))
    assert error.code == "hf.bad-files"
    assert name in error.cause
    # A device is only ever a link to one here, and is refused as that.
    assert (kind if kind != "a device" else "outside") in error.cause


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "vocab.txt", "."])
def test_a_loop_of_links_is_refused_in_words(name: str, hf: Path, tmp_path: Path) -> None:
    if name == ".":
        hf = tmp_path / "loop"
    link(hf / name, hf / name)
    for work in (lambda: import_hf(f"hf:{hf}", tmp_path / "ours"), lambda: read_regular(hf / name, 9, within=hf)):
        with pytest.raises((ArgosyError, OSError), match="Too many levels of symbolic links"):
            work()


@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a socket"])
def test_no_other_reader_waits_for_a_fifo(kind: str, tmp_path: Path) -> None:
    def planted(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        KINDS[kind](path)
        return path

    planted("checkpoint/manifest.json"), planted("corpus/manifest.json"), planted("run/resolved.json")
    readers: list[Callable[[], object]] = [
        lambda: read_checkpoint(tmp_path / "checkpoint"),
        lambda: read_manifest(tmp_path / "corpus"),
        lambda: stored_description(tmp_path / "run"),
        lambda: (
            load_tokenizer(str(planted("tokenizer.json")), None)
            if kind != "a directory"
            else load_tokenizer("/nowhere")
        ),
        lambda: IndexedReader(planted("pair.idx").with_suffix("")),
    ]
    for reader in readers:
        refusal(reader)
    planted("run/metrics.jsonl"), planted("run/heartbeat/0.json"), planted("run/logs/1/0.log"), planted("run/.lock")
    run = Run("run", tmp_path / "run")
    assert list(Tail(tmp_path / "run" / "metrics.jsonl").read()) == []
    assert read_heartbeats(tmp_path / "run" / "heartbeat") == {}
    assert end_of_log(run, 0)["lines"] == []
    assert run.spec() == {}
    assert not is_held(tmp_path / "run")
    (tmp_path / "pair.bin").unlink(missing_ok=True)


def test_what_watches_a_run_shows_no_file_outside_it(secret: Path, tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs" / "1"
    logs.mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    secret.write_text(f"RuntimeError: CUDA out of memory {SECRET}\n")
    (logs / "0.log").symlink_to(secret)
    (tmp_path / "run" / "resolved.json").symlink_to(secret)
    (tmp_path / "run" / "events.jsonl").symlink_to(secret)
    run = Run("run", tmp_path / "run")
    shown = [end_of_log(run, 0), [f.as_dict() for f in from_logs(run, [], state="dead")], run.spec(), run.events()]
    assert SECRET not in json.dumps(shown)
    (logs / "0.log").unlink()
    (logs / "0.log").write_text("RuntimeError: CUDA out of memory\n")
    assert end_of_log(run, 0)["lines"] == ["RuntimeError: CUDA out of memory"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_named_at_the_import(number: float, hf: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(hf / "model.safetensors")
    weights[name][3, 5] = number
    save_file(weights, hf / "model.safetensors", {"format": "pt"})
    error = refusal(lambda: import_hf(f"hf:{hf}", tmp_path / "ours"))
    assert error.code == "hf.bad-files"
    assert name in error.cause
    assert "1 numbers of" in error.cause
    source = open_source(f"hf:{hf}")
    assert name in refusal(lambda: [source.read(one) for one in source.infos]).cause


@pytest.mark.parametrize("number", [1e300, -3.5e38])
def test_weights_beyond_the_range_of_32_bit_floats_are_named_at_the_import(
    number: float, hf: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weights = {one: value.double() for one, value in load_file(hf / "model.safetensors").items()}
    weights[name][3, 5] = torch.finfo(torch.float32).max
    save_file(weights, hf / "model.safetensors", {"format": "pt"})
    import_hf(f"hf:{hf}", tmp_path / "largest")
    weights[name][3, 5] = number
    save_file(weights, hf / "model.safetensors", {"format": "pt"})
    error = refusal(lambda: import_hf(f"hf:{hf}", tmp_path / "ours"))
    assert error.code == "hf.bad-files"
    assert f"{name} in model.safetensors holds {number:g}" in error.cause
    assert not (tmp_path / "ours").exists()


def test_weights_beyond_the_precision_they_are_loaded_in_are_named(hf: Path) -> None:
    weights = load_file(hf / "model.safetensors")
    weights["model.norm.weight"][2] = 1e5
    save_file(weights, hf / "model.safetensors", {"format": "pt"})
    load_model(f"hf:{hf}", device="cpu", precision="bf16")
    error = refusal(lambda: load_model(f"hf:{hf}", device="cpu", precision="fp16"))
    assert error.code == "checkpoint.mismatch"
    assert "norm.weight holds 100000" in error.cause


def test_tokens_that_the_model_has_no_row_for_are_named_at_the_import_and_refused_in_a_prompt(
    hf: Path, tmp_path: Path
) -> None:
    assert "warning" not in import_hf(f"hf:{hf}", tmp_path / "before").describe(done=True)
    (hf / "tokenizer.json").write_text(
        Tokenizer(models.WordLevel({"a": 0, "b": 256, "[UNK]": 1, "<x>": 9999}, unk_token="[UNK]")).to_str()
    )
    told = import_hf(f"hf:{hf}", tmp_path / "ours").describe(done=True)
    assert "warning: the tokenizer has ids up to 9,999 ('<x>'), and the model's vocabulary ends at 256" in told
    for where in (str(tmp_path / "ours"), f"hf:{hf}"):
        assert sample(where, "b", Sampling(1), "cpu").startswith("b")
        error = refusal(lambda where=where: sample(where, "<x>", Sampling(1), "cpu"))
        assert (error.code, error.key) == ("tokenizer.vocabulary", "--prompt")
        assert "'<x>', whose id is 9,999" in error.cause


def test_a_beginning_of_text_that_the_model_has_no_row_for_is_refused(hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"bos_token_id": 70_000}))
    (hf / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    error = refusal(lambda: sample(f"hf:{hf}", "a", Sampling(1), "cpu"))
    assert (error.code, error.key) == ("tokenizer.vocabulary", "bos_token_id")
    assert "70,000" in error.cause


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", b"{", "JSON"),
        ("tokenizer.json", b"[1]", "keys and values"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "tokenizer.json"),
        ("tokenizer.json", b"\xff\xfe", "JSON"),
        ("generation_config.json", b"{broken", "JSON"),
        ("special_tokens_map.json", b"", "JSON"),
        ("tokenizer_config.json", b'"text"', "keys and values"),
        ("chat_template.jinja", b"\xff\xfe", "utf-8"),
        ("config.json", b"[]", "not an object"),
    ],
)
def test_side_files_that_are_not_what_they_say_are_refused(
    name: str, content: bytes, reason: str, hf: Path, tmp_path: Path
) -> None:
    (hf / name).write_bytes(content)
    error = refusal(lambda: import_hf(f"hf:{hf}", tmp_path / "ours"))
    assert name in error.cause
    assert reason.lower() in error.cause.lower()
    assert not (tmp_path / "ours").exists()


def test_a_file_larger_than_it_can_be_is_not_read(hf: Path, tmp_path: Path) -> None:
    with (hf / "generation_config.json").open("wb") as file:
        file.truncate(2**40)  # a hole: it takes no space
    error = refusal(lambda: import_hf(f"hf:{hf}", tmp_path / "ours"))
    assert "1,099,511,627,776 bytes" in error.cause
    with pytest.raises(OSError, match="at most 4"):
        read_regular(hf / "config.json", 4)


def test_a_tokenizer_whose_pattern_backtracks_is_refused_in_words(hf: Path, tmp_path: Path) -> None:
    (hf / "tokenizer.json").write_text(tokenizer("(x|xx)+c"))
    engine = load_tokenizer(str(hf / "tokenizer.json"))
    assert len(engine.encode("xxc")) > 0
    # The import tries it on hard strings, of which one is a long run of x.
    for work in (lambda: engine.encode("x" * 60 + "b"), lambda: import_hf(f"hf:{hf}", tmp_path / "ours")):
        error = refusal(work)
        assert error.code == "tokenizer.failed"
        assert "exponential time" in error.cause


def test_weights_that_are_numbers_are_imported(hf: Path, tmp_path: Path) -> None:
    import_hf(f"hf:{hf}", tmp_path / "ours")
    source = open_source(str(tmp_path / "ours"))
    assert all(torch.isfinite(source.read(name)).all() for name in source.infos)

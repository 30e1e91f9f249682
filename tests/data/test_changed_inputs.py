"""An input that changes during `prepare` is refused with its name: while it is read, between two parts, and after a kill."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from meanwhile import when_reading

from argosy.data.corpus.corpus_manifest import Manifest, read_manifest
from argosy.data.curate import curate_work
from argosy.data.curate.curate_job import curate
from argosy.data.curate.curate_work import CurateSharing
from argosy.data.curate.curated_part import CuratedPartMaker
from argosy.data.curate.pipeline_spec import make_pipeline
from argosy.data.prepare import job as preparing
from argosy.data.prepare import part_runner, work
from argosy.data.prepare.job import prepare
from argosy.data.prepare.work import PrepareOptions
from argosy.data.prepare.work_plan import Plan
from argosy.data.text import inputs as inputs_module
from argosy.data.text.input_files import open_input
from argosy.data.text.inputs import InputFile, local_input
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.data.text.train_tokenizer import train_tokenizer_on
from argosy.errors import ArgosyError

KINDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt", ".txt.gz", ".parquet")


def write(path: Path, word: str = "word", count: int = 40) -> Path:
    """Write documents whose number and length do not depend on the word."""
    lines = "".join(json.dumps({"text": f"{word} {i:06d}"}) + "\n" for i in range(count)).encode()
    if path.suffix == ".parquet":
        table = pyarrow.table({"text": [f"{word} {i:06d}" for i in range(count)]})
        pyarrow.parquet.write_table(table, path, row_group_size=10, compression="none", use_dictionary=False)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines, 0))
    else:
        path.write_bytes(zstandard.compress(lines) if path.suffix == ".zst" else lines)
    return path


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")


def rewrite(path: Path) -> None:
    """Rewrite the file in place, with the same size and a later modification time."""
    content, facts = path.read_bytes(), path.stat()
    with path.open("r+b") as file:
        file.write(content.replace(b"word", b"wurd"))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))


def replace(path: Path) -> None:
    """Replace the file by another one of the same size and modification time."""
    facts, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"word", b"wurd"))
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    os.replace(other, path)


def remove(path: Path) -> None:
    path.unlink()


CHANGES = (truncate, append, rewrite, replace, remove)


def refused(action: Callable[[], object]) -> ArgosyError:
    with pytest.raises(ArgosyError) as refusal:
        action()
    return refusal.value


def make(path: Path, output: Path, **options: object) -> dict[str, bytes]:
    assert prepare([str(path)], ByteTokenizer(), output, PrepareOptions(**{"workers": 1, **options})) is not None  # type: ignore[arg-type]
    return {file.name: file.read_bytes() for file in output.iterdir()}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_while_a_file_is_read_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, change: Callable[[Path], None]
) -> None:
    path = write(tmp_path / f"in{kind}")
    size = path.stat().st_size
    when_reading(monkeypatch, lambda _: change(path))
    error = refused(lambda: make(path, tmp_path / "out"))
    assert error.code == "data.input-changed"
    assert str(path) in error.cause
    if change in (truncate, append):
        assert f"size {size:,} -> {path.stat().st_size:,} bytes" in error.cause
    assert not (tmp_path / "out" / "manifest.json").exists()
    if change is not remove:
        again = refused(lambda: make(path, tmp_path / "out"))
        assert (again.code, str(path) in again.cause) == ("data.input-changed", True)
    write(path)
    assert make(path, tmp_path / "out", overwrite=True) == make(path, tmp_path / "new")


def test_a_read_that_comes_up_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    for read in (lambda stream: stream.read(), lambda stream: [stream.read(1 << 18) for _ in range(20)]):
        path.write_bytes(bytes(3 << 20))
        with open_input(local_input(str(path))) as stream:
            stream.read(10)
            os.truncate(path, 2 << 20)
            error = refused(lambda read=read, stream=stream: read(stream))  # type: ignore[misc]
        assert error.code == "data.input-changed"
        assert error.cause == f"{path} changed while it was being prepared: it ended at byte 2,097,152 of 3,145,728"


def kill_after_two_parts(monkeypatch: pytest.MonkeyPatch, path: Path, out: Path, **options: object) -> None:
    parts = iter(range(100))

    def killed(self: object, name: object, facts: object) -> None:
        if next(parts) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparing.Joiner, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            make(path, out, **options)
    assert list((out / ".parts").glob("*-*.json"))


@pytest.mark.parametrize("change", [append, rewrite, replace])
def test_after_a_kill_parts_of_another_version_are_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(work, "block_size", lambda files: 500)
    path, out = write(tmp_path / "in.jsonl"), tmp_path / "out"
    kill_after_two_parts(monkeypatch, path, out)
    moved = path.rename(tmp_path / "first")
    path.write_bytes(moved.read_bytes())
    os.utime(path, ns=(moved.stat().st_atime_ns, moved.stat().st_mtime_ns))
    change(path)
    error = refused(lambda: make(path, out))
    assert error.code == "data.input-changed"
    assert f"{path} changed after parts of {out} had been made from it" in error.cause
    assert " -> " in error.cause
    moved.rename(path)
    assert make(path, out) == make(path, tmp_path / "undisturbed")


def rewrite_unseen(path: Path, word: bytes = b"wurd") -> None:
    """Rewrite the file in place with the same size and modification time, as `rsync --inplace --times` does."""
    content, facts = path.read_bytes(), path.stat()
    if path.name.endswith(".gz"):
        changed = gzip.compress(gzip.decompress(content).replace(b"word", word), 0)
    else:
        changed = content.replace(b"word", word)
    assert len(changed) == len(content)
    with path.open("r+b") as file:
        file.write(changed)
    wait_for_another_ctime(path, facts)


def wait_for_another_ctime(path: Path, facts: os.stat_result) -> None:
    """Set the modification time until the ctime differs. Both have the resolution of the kernel's clock, a few ms."""
    while path.stat().st_ctime_ns == facts.st_ctime_ns or path.stat().st_mtime_ns != facts.st_mtime_ns:
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".txt", ".parquet"])
def test_after_a_kill_other_content_with_the_same_size_and_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(work, "block_size", lambda files: 500)
    path, out = write(tmp_path / f"in{kind}"), tmp_path / "out"
    options = {"text_lines": kind == ".txt"}
    kill_after_two_parts(monkeypatch, path, out, **options)
    rewrite_unseen(path)
    for _ in range(2):
        error = refused(lambda: make(path, out, **options))
        assert error.code == "data.input-changed"
        assert f"{path} changed after parts of {out} had been made from it: content of block 0 CRC-32 " in error.cause
    assert make(path, out, overwrite=True, **options) == make(path, tmp_path / "new", **options)


def test_after_a_kill_another_ctime_alone_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "block_size", lambda files: 500)
    path, out = write(tmp_path / "in.jsonl"), tmp_path / "out"
    kill_after_two_parts(monkeypatch, path, out)
    wait_for_another_ctime(path, path.stat())
    assert make(path, out) == make(path, tmp_path / "undisturbed")


def test_a_plan_of_an_earlier_version_without_ctimes_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "block_size", lambda files: 500)
    path, out = write(tmp_path / "in.jsonl"), tmp_path / "out"
    kill_after_two_parts(monkeypatch, path, out)
    plan = json.loads((out / ".parts" / "plan").read_bytes())
    assert plan.pop("ctimes") == [path.stat().st_ctime_ns]
    (out / ".parts" / "plan").write_text(json.dumps(plan))
    wait_for_another_ctime(path, path.stat())
    assert make(path, out) == make(path, tmp_path / "undisturbed")


def test_the_hash_of_a_plan_does_not_depend_on_the_ctime(tmp_path: Path) -> None:
    file = local_input(str(write(tmp_path / "in.jsonl")))
    plan, later = (Plan.of("options", [dataclasses.replace(file, ctime=ctime)], with_inodes=True) for ctime in (1, 2))
    assert plan.digest() == later.digest()
    assert (plan.touched(plan.content()), later.touched(plan.content())) == (set(), {file.path})


def test_curate_compares_the_content_of_finished_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curate_work, "block_size", lambda files: 500)
    path, out, made = write(tmp_path / "in.jsonl"), tmp_path / "out", iter(range(100))
    pipeline = make_pipeline({"inputs": [str(path)], "output": str(out), "steps": ["exact_duplicates"]})
    make_part = CuratedPartMaker.make

    def killed(self: CuratedPartMaker, name: object, group: list[InputFile]) -> object:
        if next(made) == 2:
            raise KeyboardInterrupt
        return make_part(self, name, group)

    with monkeypatch.context() as patch:
        patch.setattr(CuratedPartMaker, "make", killed)
        with pytest.raises(KeyboardInterrupt):
            curate(pipeline, CurateSharing(workers=1))
    rewrite_unseen(path)
    error = refused(lambda: curate(pipeline, CurateSharing(workers=1)))
    assert (error.code, str(path) in error.cause) == ("data.input-changed", True)
    report = curate(pipeline, CurateSharing(workers=1, overwrite=True))
    assert report is not None
    assert report.documents == 40


def test_other_processes_compare_finished_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "block_size", lambda files: 500)
    path, out = write(tmp_path / "in.jsonl"), tmp_path / "out"
    kill_after_two_parts(monkeypatch, path, out)
    rewrite_unseen(path)
    monkeypatch.setattr(part_runner, "_INLINE_BYTES", 0)
    assert refused(lambda: make(path, out, workers=2)).code == "data.input-changed"
    assert make(path, out, workers=2, overwrite=True) == make(path, tmp_path / "new", workers=1)


def test_machines_compare_their_content_with_that_of_the_others(tmp_path: Path) -> None:
    path, out = write(tmp_path / "in.jsonl"), tmp_path / "out"
    options = [PrepareOptions(workers=1, shards=2, machine=machine, machines=2) for machine in (0, 1)]
    assert prepare([str(path)], ByteTokenizer(), out, options[0]) is None
    rewrite_unseen(path)
    error = refused(lambda: prepare([str(path)], ByteTokenizer(), out, options[1]))
    assert (error.code, str(path) in error.cause) == ("data.input-changed", True)


def test_other_content_with_the_same_size_and_time_is_seen_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "block_size", lambda files: 500)
    path = write(tmp_path / "in.jsonl")
    when_reading(monkeypatch, lambda _: rewrite_unseen(path))
    error = refused(lambda: make(path, tmp_path / "out"))
    assert (error.code, str(path) in error.cause) == ("data.input-changed", True)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_change_is_seen_by_other_processes_and_crosses_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "block_size", lambda files: 500)
    monkeypatch.setattr(part_runner, "_INLINE_BYTES", 0)
    # Use many more blocks than workers, so that most are assigned after the first part was joined.
    path, add, added = write(tmp_path / "in.jsonl", count=400), preparing.Joiner.add, []

    def and_change(self: preparing.Joiner, *part: object) -> None:
        if not added:
            rewrite(path)
        added.append(part)
        add(self, *part)  # type: ignore[arg-type]

    monkeypatch.setattr(preparing.Joiner, "add", and_change)
    error = refused(lambda: make(path, tmp_path / "out", workers=2))
    assert error.code == "data.input-changed"
    assert str(path) in error.cause


def test_machines_refuse_an_input_that_another_machine_saw_otherwise(tmp_path: Path) -> None:
    path, out = write(tmp_path / "in.jsonl"), tmp_path / "out"
    options = [PrepareOptions(workers=1, shards=2, machine=machine, machines=2) for machine in (0, 1)]
    assert prepare([str(path)], ByteTokenizer(), out, options[0]) is None
    rewrite(path)
    error = refused(lambda: prepare([str(path)], ByteTokenizer(), out, options[1]))
    assert (error.code, str(path) in error.cause) == ("data.input-changed", True)


def test_machines_may_have_copies_of_their_own_with_the_same_time(tmp_path: Path) -> None:
    path, out = write(tmp_path / "in.jsonl"), tmp_path / "out"
    options = [PrepareOptions(workers=1, shards=2, machine=machine, machines=2) for machine in (0, 1)]
    assert prepare([str(path)], ByteTokenizer(), out, options[0]) is None
    facts, inode = path.stat(), path.stat().st_ino
    path.rename(tmp_path / "elsewhere")
    path.write_bytes((tmp_path / "elsewhere").read_bytes())
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert path.stat().st_ino != inode
    assert prepare([str(path)], ByteTokenizer(), out, options[1]) is not None


def test_a_half_made_corpus_of_an_earlier_version_is_refused_and_replaced_on_demand(tmp_path: Path) -> None:
    path, out = write(tmp_path / "in.jsonl"), tmp_path / "out"
    (out / ".parts").mkdir(parents=True)
    (out / ".parts" / "plan").write_bytes(b"0123456789abcdef" * 4)
    error = refused(lambda: make(path, out))
    assert (error.code, "kept no fingerprints" in error.cause) == ("data.other-plan", True)
    assert make(path, out, overwrite=True) == make(path, tmp_path / "new")


def test_other_inputs_in_a_half_made_corpus_are_named(tmp_path: Path) -> None:
    first, second, out = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl"), tmp_path / "out"
    options = PrepareOptions(workers=1, shards=2, machines=2)
    prepare([str(first)], ByteTokenizer(), out, options)
    error = refused(lambda: prepare([str(first), str(second)], ByteTokenizer(), out, options))
    assert (error.code, str(second) in error.cause) == ("data.other-plan", True)


def test_the_manifest_keeps_what_was_read_and_one_without_it_still_loads(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl")
    make(path, tmp_path / "one", shards=1)
    [source] = read_manifest(tmp_path / "one").sources
    assert source.version == local_input(str(path)).version
    same = write(tmp_path / "same.jsonl")
    other = write(tmp_path / "other.jsonl", "wurd")
    contents = {name: make_source(tmp_path, file) for name, file in (("same", same), ("other", other))}
    assert contents["same"] == source.content != contents["other"]
    document = json.loads((tmp_path / "one" / "manifest.json").read_bytes())
    for old in document["sources"]:
        del old["version"], old["content"]
    assert Manifest.model_validate(document).sources[0].version is None


def make_source(tmp_path: Path, path: Path) -> str | None:
    make(path, tmp_path / path.stem)
    return read_manifest(tmp_path / path.stem).sources[0].content


def test_a_tokenizer_is_not_trained_on_a_file_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "in.jsonl")
    when_reading(monkeypatch, lambda _: truncate(path))
    error = refused(lambda: train_tokenizer_on([str(path)], 300, tmp_path / "t.json", ["text"], overwrite=False))
    assert (error.code, str(path) in error.cause) == ("data.input-changed", True)
    assert not (tmp_path / "t.json").exists()


def test_inodes_of_object_stores_that_are_mounted_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path.stat().st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw shared:1 - fuse.gcsfuse bucket rw\n"
    read_text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, **k: line if str(self) == "/proc/self/mountinfo" else read_text(self, **k)
    )
    inputs_module._keeps_inodes.cache_clear()
    try:
        assert local_input(str(write(tmp_path / "in.jsonl"))).inode == 0
    finally:
        inputs_module._keeps_inodes.cache_clear()

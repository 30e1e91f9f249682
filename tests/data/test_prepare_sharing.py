"""The bytes of a corpus do not depend on the number of processes or machines, nor on how often they were killed."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

import forking
from argosy.data.corpus.corpus import open_corpus
from argosy.data.corpus.corpus_manifest import read_manifest
from argosy.data.prepare import claim, part_runner, work
from argosy.data.prepare import job as preparing
from argosy.data.prepare.job import prepare
from argosy.data.prepare.parts import PartOptions
from argosy.data.prepare.work import PrepareOptions, Work
from argosy.data.prepare.workers import Pool, encoder_spec
from argosy.data.text import engines
from argosy.data.text.inputs import find_inputs, group_inputs
from argosy.data.text.tokenizer import ByteTokenizer, JsonTokenizer, train_bpe
from argosy.errors import ArgosyError
from argosy.files import create_file
from forking import Popen
from waiting import PATIENCE_S


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write a few MB in every format, with bad records here and there."""
    root = tmp_path_factory.mktemp("inputs")
    rng = random.Random(0)

    def lines(count: int) -> bytes:
        records = []
        for i in range(count):
            record = json.dumps({"text": f"{i} " + rng.choice("abcdefgh") * rng.randrange(1, 1000), "n": i})
            records.append(record if rng.random() > 0.02 else record[:-3])
        return "\n".join(records).encode()

    (root / "a.jsonl").write_bytes(lines(3000))
    (root / "b.jsonl.gz").write_bytes(gzip.compress(lines(1500), 1))
    (root / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines(1500)))
    rows = {"text": [f"row {i} " + rng.choice("abcd") * rng.randrange(1, 1000) for i in range(500)]}
    pyarrow.parquet.write_table(pyarrow.table(rows), root / "e.parquet", row_group_size=200)
    for i in range(20):
        (root / f"d{i:02d}.txt").write_text(f"text file {i} " * rng.randrange(1, 300))
    return [str(root)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks small, so that a few MB are many blocks."""
    monkeypatch.setattr(work, "block_size", lambda files: 1 << 17)
    monkeypatch.setattr(part_runner, "_INLINE_BYTES", 1 << 18)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != work.PLAN_FILE}


def make(inputs: list[str], output: Path, **options: object) -> dict[str, bytes]:
    assert prepare(inputs, ByteTokenizer(), output, PrepareOptions(**options)) is not None  # type: ignore[arg-type]
    return content(output)


@pytest.mark.parametrize("shards", [1, 3])
def test_workers_do_not_change_the_bytes(inputs: list[str], tmp_path: Path, shards: int) -> None:
    one = make(inputs, tmp_path / "one", workers=1, shards=shards)
    three = make(inputs, tmp_path / "three", workers=3, shards=shards)
    assert one == three
    assert len([name for name in one if name.endswith(".bin")]) == shards
    manifest = read_manifest(tmp_path / "one")
    assert manifest.documents + sum(manifest.quarantined.values()) == 6520
    assert open_corpus(tmp_path / "three").documents == manifest.documents


def test_machines_do_not_change_the_bytes_and_the_last_one_writes_the_manifest(
    inputs: list[str], tmp_path: Path
) -> None:
    alone = make(inputs, tmp_path / "alone", workers=1, shards=5)
    shared = tmp_path / "shared"
    for machine in (1, 2, 0):
        options = PrepareOptions(workers=1, shards=5, machine=machine, machines=3)
        done = prepare(inputs, ByteTokenizer(), shared, options)
        assert (done is not None) == (machine == 0)
    assert content(shared) == alone


def test_a_machine_that_comes_after_the_end_says_so_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="argosy")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(40)))
    out = tmp_path / "out"

    def share(machine: int, **options: object) -> object:
        chosen = PrepareOptions(**{"workers": 2, "shards": 2, "machine": machine, "machines": 2} | options)  # type: ignore[arg-type]
        return prepare([str(tmp_path / "x.jsonl")], ByteTokenizer(), out, chosen)

    share(0)
    made = share(1)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    # Nor does it start workers.
    with monkeypatch.context() as patch:
        patch.setattr(preparing.PrepareJob, "make_shards", None)
        assert share(1) == share(0) == made
    assert f"{out} is finished: nothing is left to do" in caplog.text
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    for options in ({"shuffle_seed": 1}, {"append_eod": False}, {"machines": 1}):
        with pytest.raises(ArgosyError, match="already holds a prepared corpus"):
            share(0, **options)
    share(0, overwrite=True, shuffle_seed=1)
    with pytest.raises(ArgosyError, match="with other options"):
        share(0)


@pytest.mark.parametrize("removed", [False, True])
def test_a_machine_that_starts_while_another_one_ends_the_job_has_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "x"}\n' * 9)

    def share(machine: int) -> object:
        options = PrepareOptions(workers=1, shards=2, machine=machine, machines=2)
        return prepare([str(tmp_path / "x.jsonl")], ByteTokenizer(), tmp_path / "out", options)

    made = []

    def create_after_the_end(plan: Path, content: bytes) -> bool:
        monkeypatch.setattr(claim, "create_file", create_file)
        made.extend((share(0), share(1)))
        if not removed:
            plan.parent.mkdir()
            plan.write_bytes(content)
        return create_file(plan, content)

    monkeypatch.setattr(claim, "create_file", create_after_the_end)
    assert share(1) == made[1] is not None
    assert not (tmp_path / "out" / ".parts").exists()


def test_machines_that_are_last_together_both_have_the_corpus(inputs: list[str], tmp_path: Path) -> None:
    jobs = [
        preparing.PrepareJob(
            Work(
                find_inputs(inputs),
                ByteTokenizer(),
                tmp_path / "shared",
                PrepareOptions(workers=1, shards=2, machine=machine, machines=2),
            )
        )
        for machine in (0, 1)
    ]
    for job in jobs:
        with job.runner:
            job.claim()
            job.make_shards()
    # Both find all shards; the first one removes the parts.
    first, second = (preparing.finish(job.work) for job in jobs)
    assert first is not None
    assert first == second
    assert content(tmp_path / "shared") == make(inputs, tmp_path / "alone", workers=1, shards=2)


def test_one_shard_keeps_the_order_of_the_inputs(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(400)))
    make([str(tmp_path / "x.jsonl")], tmp_path / "out", append_eod=False)
    reader = open_corpus(tmp_path / "out").shards[0]
    assert [ByteTokenizer().decode(reader.sequence(i)) for i in range(400)] == [str(i) for i in range(400)]


def test_shuffling_keeps_every_document_and_repeats_with_its_seed(inputs: list[str], tmp_path: Path) -> None:
    def documents(directory: Path) -> list[bytes]:
        reader = open_corpus(directory).shards[0]
        return [reader.sequence(i).tobytes() for i in range(reader.sequences)]

    make(inputs, tmp_path / "plain", workers=1)
    first = make(inputs, tmp_path / "first", workers=1, shuffle_seed=1)
    again = make(inputs, tmp_path / "again", workers=2, shuffle_seed=1)
    assert first == again
    plain, shuffled = documents(tmp_path / "plain"), documents(tmp_path / "first")
    assert plain != shuffled
    assert sorted(plain) == sorted(shuffled)


def test_nested_keys_and_lists_of_sentences(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        '{"meta": {"body": ["One.", "Two three."]}}\n{"meta": {"body": "Alone"}}\n{"meta": 5}\n'
    )
    make([str(tmp_path / "x.jsonl")], tmp_path / "out", keys=("meta.body",))
    reader = open_corpus(tmp_path / "out").shards[0]
    texts = [reader.sequence(i).tolist() for i in range(reader.sequences)]
    assert texts == [list(b"One."), [*b"Two three.", 256], [*b"Alone", 256]]
    assert reader.document_indices.tolist() == [0, 2, 3]
    assert read_manifest(tmp_path / "out").quarantined == {"not-an-object": 1}


def test_a_fall_back_to_the_slow_engine_is_said(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="argosy")
    monkeypatch.setattr(engines, "ENGINES", {})
    tokenizer = JsonTokenizer(train_bpe(["some text of no matter"] * 9, 300), "t")
    assert prepare(inputs[:1], tokenizer, tmp_path / "out", PrepareOptions(workers=2)) is not None
    assert "tokenizing with tokenizers, the reference" in caplog.text


def test_every_worker_proves_its_engine(inputs: list[str], tmp_path: Path) -> None:
    pytest.importorskip("fastokens")
    tokenizer = JsonTokenizer(train_bpe(["some text of no matter"] * 9, 300), "t")
    other = JsonTokenizer(train_bpe(["another text, so other ids"] * 9, 300), "t")
    options = PartOptions(("text",), True, False, 1 << 17)
    groups = group_inputs(find_inputs(inputs), text_lines=False)
    spec = encoder_spec(tokenizer, "fastokens", eod=None)
    for reference, content, fault in (
        (tokenizer, spec.content, None),
        (other, spec.content, "differs from the reference on"),
        (tokenizer, b"{}", "cannot load this tokenizer"),
    ):
        pool = Pool(2, tmp_path, replace(spec, content=content), options, sampled=groups)
        try:
            with contextlib.nullcontext() if fault is None else pytest.raises(engines.EngineFault, match=fault):
                pool.prove(reference)
        finally:
            pool.close()


def test_an_unfinished_job_with_other_options_is_not_mixed_with_this_one(inputs: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(inputs, ByteTokenizer(), out, PrepareOptions(workers=1, shards=2, machine=0, machines=2))
    with pytest.raises(ArgosyError) as refusal:
        prepare(inputs, ByteTokenizer(), out, PrepareOptions(workers=1, shards=3))
    assert refusal.value.code == "data.other-plan"
    assert make(inputs, out, workers=1, shards=3, overwrite=True) == make(inputs, tmp_path / "new", workers=1, shards=3)


COMMAND = """
import sys
from pathlib import Path
from argosy.data.prepare import part_runner, work
from argosy.data.prepare.job import prepare
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.log_handler import install_log_handler
work.block_size = lambda files: 1 << 17
part_runner._INLINE_BYTES = 1 << 18
if __name__ == "__main__":
    install_log_handler()
    prepare(sys.argv[2:], ByteTokenizer(), Path(sys.argv[1]), work.PrepareOptions(workers=2, shards=2))
"""


# Starts of a job for each kill that hits it.
_MOST_TRIES = 20


def kill_and_finish(inputs: list[str], root: Path, kills: int) -> None:
    """Kill the job at random moments and start it again. Whenever it finishes, its bytes equal those of an undisturbed job.

    Only kills that hit a running job are counted. A job that resumes may end before its kill, so there are more tries than kills.
    """
    script, rng = root / "script.py", random.Random(0)
    script.write_text(COMMAND)
    command = [sys.executable, str(script)]
    # The first command waits for the fork server to start.
    forking.run(["--version"])
    started = time.monotonic()
    assert Popen([*command, str(root / "undisturbed"), *inputs]).wait() == 0
    usual, expected, done = time.monotonic() - started, content(root / "undisturbed"), 0
    tries = _MOST_TRIES * kills
    while kills:
        tries -= 1
        assert tries >= 0, f"{kills} kills came too late: an undisturbed job took {usual:.2f} s"
        output = root / f"killed-{done}"
        process = Popen([*command, str(output), *inputs], start_new_session=True)
        waited = rng.uniform(min(0.1, usual / 4), usual)
        time.sleep(waited)
        if process.poll() is None:
            kills -= 1
        else:
            # The first one took longer than it had to.
            usual = min(usual, waited)
        assert not process.returncode, "it fails by itself"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not kills and not (output / "manifest.json").exists():
            assert Popen([*command, str(output), *inputs]).wait() == 0
        if (output / "manifest.json").exists():
            # A kill may leave it behind a finished corpus.
            shutil.rmtree(output / ".parts", ignore_errors=True)
            assert content(output) == expected
            done += 1


def test_killed_again_and_again_the_bytes_are_the_same(inputs: list[str], tmp_path: Path) -> None:
    kill_and_finish(inputs, tmp_path, 5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_fifty_times_the_bytes_are_the_same(inputs: list[str], tmp_path: Path) -> None:
    kill_and_finish(inputs, tmp_path, 50)


def test_a_file_that_a_killed_process_was_writing_is_not_left_beside_the_corpus(
    inputs: list[str], tmp_path: Path
) -> None:
    tmp_path.joinpath("out").mkdir()
    left, other = (tmp_path / "out" / name for name in (".manifest.json.0123456789ab", ".mine"))
    left.write_bytes(b"{")
    other.write_bytes(b"")
    found = make(inputs, tmp_path / "out", workers=1)
    assert (left.name in found, other.name in found) == (False, True)


def test_what_killed_processes_left_of_a_machines_parts_is_cleared_away(inputs: list[str], tmp_path: Path) -> None:
    options = PrepareOptions(workers=1, shards=2, machine=1, machines=2)
    job = preparing.PrepareJob(Work(find_inputs(inputs), ByteTokenizer(), tmp_path, options))
    job.claim()
    names = [f"{group:05d}-{block:06d}.0.bin.0123ab.partial" for group in (0, 1) for block in (0, 1)]
    for name in names:
        (job.work.parts / name).touch()
    job.release()
    job.claim()
    # Those of the other machine's shard stay.
    assert {path.name for path in job.work.parts.glob("*.partial")} == {names[0], names[3]}
    job.release()


def test_started_twice_at_once_one_makes_the_corpus_and_the_other_waits_for_it(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two processes starts while the first is at work."""
    script, output = tmp_path / "script.py", tmp_path / "out"
    script.write_text(COMMAND)
    command = [sys.executable, str(script), str(output), *inputs]
    second: list[subprocess.Popen[str]] = []
    finish = preparing.finish

    def meanwhile(work: Work) -> object:
        if not second:
            second.append(Popen(command, stderr=subprocess.PIPE, text=True))
            assert second[0].stderr is not None
            assert "waiting for it to end" in second[0].stderr.readline()
        return finish(work)

    monkeypatch.setattr(preparing, "finish", meanwhile)
    made = make(inputs, output, workers=1, shards=2)
    assert second[0].communicate(timeout=PATIENCE_S)[1] == ""
    assert second[0].returncode == 0
    assert content(output) == made == make(inputs, tmp_path / "alone", workers=1, shards=2)


def test_a_worker_that_is_killed_ends_the_job_with_its_name_and_the_rest_is_kept(
    inputs: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        COMMAND.replace("import sys\n", "import os, signal, sys\nfrom argosy.data.text.records import Parser\n", 1)
        + """
else:
    parse = Parser.parse
    def die(self, piece):
        if b"2500 " in b"".join(r[:20] for r in piece.records if isinstance(r, bytes)):
            os.kill(os.getpid(), signal.SIGKILL)
        return parse(self, piece)
    Parser.parse = die
"""
    )
    process = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out"), *inputs],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert process.returncode != 0
    assert "a worker died while making part" in process.stderr
    assert list((tmp_path / "out" / ".parts").glob("*.json"))
    assert make(inputs, tmp_path / "out", workers=1, shards=2) == make(inputs, tmp_path / "new", workers=1, shards=2)


def test_a_machine_beyond_the_count_is_refused() -> None:
    with pytest.raises(ArgosyError, match="numbered from 0 to 1") as refused:
        PrepareOptions(machine=2, machines=2)
    assert refused.value.key == "--shard-index"

"""`argosy data curate`: every record is accounted for, and the bytes depend on the inputs and the pipeline alone."""

from __future__ import annotations

import errno
import fcntl
import gzip
import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml
import zstandard
from nasty_texts import PLAIN

from argosy.data.corpus.corpus import open_corpus
from argosy.data.corpus.verify import verify
from argosy.data.curate import curate_work, duplicate_search
from argosy.data.curate.curate_job import curate
from argosy.data.curate.curate_report import CurationReport
from argosy.data.curate.curate_work import CurateSharing
from argosy.data.curate.curated_part import CuratedPartMaker
from argosy.data.curate.curated_shards import ShardWriter, WriteKept
from argosy.data.curate.near_duplicates import Step as NearDuplicates
from argosy.data.curate.pipeline_spec import read_pipeline
from argosy.data.curate.text_batch import TextBatch
from argosy.data.prepare import claim, part_runner, resuming
from argosy.data.prepare.job import prepare
from argosy.data.prepare.locks import PieceLocks
from argosy.data.prepare.piece_queue import PieceQueue
from argosy.data.prepare.work import PrepareOptions
from argosy.data.text.inputs import find_inputs
from argosy.data.text.readers import all_texts
from argosy.data.text.tokenizer import ByteTokenizer
from argosy.errors import ArgosyError
from argosy.files import create_file

SECRET = "what is the capital of the small country that lies between the two seas of the north"


def prose(rng: random.Random, words: int = 120) -> str:
    return " ".join(rng.choice(PLAIN) + ("" if rng.random() < 0.9 else ".") for _ in range(words)) + "."


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write documents in every format: good ones, bad ones, copies, near copies, and one that holds a test question."""
    root = tmp_path_factory.mktemp("raw")
    rng = random.Random(0)
    texts = [prose(rng) for _ in range(600)]
    texts += texts[:30] + [text.replace("time", "moment", 1) for text in texts[100:130]]
    texts += [
        "short",
        "12 34 56 78 " * 40,
        texts[5] + " " + SECRET,
        texts[6] + " Write to someone@mail.example.com please.",
    ]
    rng.shuffle(texts)
    records = [json.dumps({"text": text, "url": f"u{i}", "n": i}) for i, text in enumerate(texts)]
    records[7] = records[7][:-4]
    (root / "a.jsonl").write_text("\n".join(records[:250]))
    (root / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(records[250:400]).encode()))
    (root / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress("\n".join(records[400:550]).encode()))
    rest = [json.loads(record) for record in records[550:]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rest), root / "d.parquet", row_group_size=40)
    (root / "eval").mkdir()
    (root / "eval" / "quiz.jsonl").write_text(json.dumps({"question": SECRET, "choices": ["x", "y"]}))
    return root


STEPS: list[Any] = [
    {"length": {"min_characters": 50}},
    {"language": {"keep": ["en"]}},
    {"gopher_quality": {"min_avg_word_length": 2}},
    "mask_pii",
    "exact_duplicates",
    "near_duplicates",
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks small, so that little text is many blocks, and compare few keys at a time."""
    monkeypatch.setattr(curate_work, "block_size", lambda files: 1 << 15)
    monkeypatch.setattr(part_runner, "_INLINE_BYTES", 1)
    monkeypatch.setattr(duplicate_search, "CANDIDATES", 200)


def write(path: Path, raw: Path, **keys: Any) -> Path:
    steps = [*STEPS[:3], {"decontaminate": {"against": [str(raw / "eval" / "quiz.jsonl")]}}, *STEPS[3:]]
    inputs = [str(raw / name) for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet")]
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(yaml.safe_dump({"inputs": inputs, "output": str(path.parent / "out"), "steps": steps} | keys))
    return path


def run(path: Path, **sharing: Any) -> tuple[CurationReport | None, dict[str, bytes]]:
    report = curate(read_pipeline(path), CurateSharing(**{"workers": 1} | sharing))
    output = Path(read_pipeline(path).spec.output)
    content = {file.name: file.read_bytes() for file in output.iterdir() if file.is_file()}
    # The report names the directory.
    return report, {name: data.replace(str(output).encode(), b"out") for name, data in content.items()}


def lines_of(content: dict[str, bytes]) -> list[Any]:
    data = content["shard-00000.jsonl.zst"]
    text = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def reference(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[CurationReport, dict[str, bytes]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curate_work, "block_size", lambda files: 1 << 15)
        report, content = run(write(tmp_path_factory.mktemp("one") / "p.yaml", raw, shards=3, fields=["url"]))
    assert report is not None
    return report, content


def test_every_record_is_counted_once_and_the_report_shows_examples(
    reference: tuple[CurationReport, dict[str, bytes]], raw: Path
) -> None:
    report, content = reference
    removed = {step["name"]: sum(step["removed"].values()) for step in report.steps}
    assert report.records == 664 == report.documents + sum(removed.values()) + 1
    assert report.quarantined == {"broken-json": 1}
    assert removed["length"] == 1
    assert removed["decontaminate"] == 1
    assert removed["exact_duplicates"] >= 29
    assert removed["near_duplicates"] >= 25
    assert {step["name"]: step["changed"] for step in report.steps}["mask_pii"] == 1
    near = report.steps[-1]["examples"][0]
    assert near["text"] != near["kept"]["text"] or near["offset"] != near["kept"]["offset"]
    assert "near_duplicates" in report.table()
    assert sum(source["documents"] for source in report.sources) == report.documents
    assert len(content["quarantine.ndjson"].splitlines()) == 1


def test_the_output_is_an_input_of_prepare_with_the_fields_that_were_named(
    reference: tuple[CurationReport, dict[str, bytes]], tmp_path: Path
) -> None:
    report, content = reference
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    files = find_inputs([str(tmp_path)])
    texts = list(all_texts([[file] for file in files], ["text"]))
    assert len(texts) == len(set(texts)) == report.documents
    assert not any(SECRET in text for text in texts)
    assert sum("email@example.com" in text for text in texts) == 1
    first = zstandard.ZstdDecompressor().stream_reader(content["shard-00000.jsonl.zst"], read_across_frames=True).read()
    assert set(json.loads(first.splitlines()[0])) == {"text", "url"}


def test_workers_and_the_number_of_machines_do_not_change_the_bytes(
    reference: tuple[CurationReport, dict[str, bytes]], raw: Path, tmp_path: Path
) -> None:
    _, expected = reference
    # A machine that is alone does the work of the others too.
    alone = write(tmp_path / "alone" / "p.yaml", raw, shards=3, fields=["url"])
    assert run(alone, machine=1, machines=2)[1] == expected
    pool = write(tmp_path / "pool" / "p.yaml", raw, shards=3, fields=["url"])
    assert run(pool, workers=2)[1] == expected


def test_without_locks_machines_do_their_own_shards_and_run_again(
    reference: tuple[CurationReport, dict[str, bytes]],
    raw: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    path = write(tmp_path / "p.yaml", raw, shards=3, fields=["url"])
    # The second machine makes its parts first and ends; the first finds all parts made and goes on.
    assert run(path, machine=1, machines=2)[0] is None
    assert run(path, machine=0, machines=2)[0] is None
    assert run(path, machine=1, machines=2)[1] == reference[1]


@pytest.mark.parametrize("method", ["take", "finish"])
def test_a_failure_of_the_file_system_that_passes_does_not_change_the_bytes(
    reference: tuple[CurationReport, dict[str, bytes]],
    raw: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    owner: Any = PieceLocks if method == "take" else ShardWriter
    working, failures = getattr(owner, method), [OSError(errno.EIO, "Input/output error")]

    def sometimes(*given: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return working(*given, **named)

    monkeypatch.setattr(owner, method, sometimes)
    monkeypatch.setattr(resuming, "RETRY", replace(resuming.RETRY, base_s=0.0))
    assert run(write(tmp_path / "p.yaml", raw, shards=3, fields=["url"]))[1] == reference[1]
    assert not failures


@pytest.mark.parametrize("tokenizer", [None, "bytes"])
def test_two_writers_of_one_shard_do_not_write_into_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str | None
) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "{number}"}}\n' for number in range(99)))
    keys: dict[str, Any] = {
        "inputs": [str(tmp_path / "in.jsonl")],
        "steps": ["exact_duplicates"],
        "tokenizer": tokenizer,
    }
    _, expected = run(write(tmp_path / "alone" / "p.yaml", tmp_path, **keys))
    finish = ShardWriter.finish

    def finish_while_another_begins(writer: ShardWriter) -> dict[str, Any]:
        other = ShardWriter(writer.work, 0, writer.duplicates)
        facts = finish(writer)
        other.add("00000-000000")
        assert finish(other) == facts
        # What a killed process left is removed at the end.
        ShardWriter(writer.work, 0, writer.duplicates)
        return facts

    monkeypatch.setattr(ShardWriter, "finish", finish_while_another_begins)
    assert run(write(tmp_path / "p.yaml", tmp_path, **keys))[1] == expected


def test_a_nested_field_is_found_as_a_nested_key_is(tmp_path: Path) -> None:
    records = [{"meta": {"body": f"text {lang}", "lang": lang}} for lang in ("en", "de")]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "in.parquet")
    keys = {"key": "meta.body", "fields": ["meta.lang"], "steps": [{"field": {"name": "meta.lang", "values": ["de"]}}]}
    inputs = [str(tmp_path / name) for name in ("in.jsonl", "in.parquet")]
    _, content = run(write(tmp_path / "p.yaml", tmp_path, inputs=inputs, **keys))
    assert lines_of(content) == [{"text": "text de", "meta.lang": "de"}] * 2


# Children of this process, which has loaded what a task needs.
FORK = multiprocessing.get_context("fork")
STOPS: dict[str, tuple[type, str]] = {
    "part": (CuratedPartMaker, "_write"),
    "search": (duplicate_search.FindCandidates, "run"),
}


STARTED: list[Any] = []


@pytest.fixture(autouse=True)
def no_child_outlives_its_test() -> Iterator[None]:
    """Kill the tasks that a test has left, also those that are stopped."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.join()


def _task(path: Path, machine: int, machines: int, stops_at: str | None, done: int) -> None:
    if stops_at is not None:
        (owner, name), calls = STOPS[stops_at], itertools.count()
        call = getattr(owner, name)

        def stop(*given: Any) -> Any:
            if next(calls) == done:
                os.kill(os.getpid(), signal.SIGSTOP)
            return call(*given)

        setattr(owner, name, stop)
    assert curate(read_pipeline(path), CurateSharing(1, machine, machines)) is not None


def start(path: Path, machine: int = 0, machines: int = 1, stops_at: str | None = None, done: int = 0) -> Any:
    """Start a task. `stops_at` names work at which it stops, holding what it has taken, after `done` pieces of it."""
    process = FORK.Process(target=_task, args=(path, machine, machines, stops_at, done))
    process.start()
    STARTED.append(process)
    return process


def wait_to_stop(process: Any) -> None:
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert process.is_alive()


def kill(process: Any) -> None:
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_killed_job_goes_on_to_the_same_bytes(
    reference: tuple[CurationReport, dict[str, bytes]], raw: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "p.yaml", raw, shards=3, fields=["url"])
    parts = tmp_path / "out" / ".parts"
    # Killed with some parts made, and again during the search.
    for work, files in (("part", "*-*.json"), ("search", "pairs-*")):
        process = start(path, stops_at=work, done=2)
        wait_to_stop(process)
        kill(process)
        assert len(list(parts.glob(files))) >= 2
    assert run(path)[1] == reference[1]


def test_what_killed_tasks_had_taken_is_done_by_others_and_late_tasks_change_nothing(
    reference: tuple[CurationReport, dict[str, bytes]], raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "p.yaml", raw, shards=3, fields=["url"])
    first = start(path, 0, 3, stops_at="part")
    wait_to_stop(first)
    second = start(path, 1, 3, stops_at="search")
    lists = tmp_path / "out" / ".parts"
    while len(list(lists.glob("parts-*"))) < 2:
        assert second.is_alive()
        time.sleep(0.01)
    assert not (lists / "parts-00000").exists()
    kill(first)
    wait_to_stop(second)
    assert (lists / "parts-00000").exists()
    waited, wait = [], PieceQueue.wait

    def wait_for_the_killed(queue: PieceQueue, missing: list[int]) -> None:
        waited.append(len(missing))
        kill(second)
        wait(queue, missing)

    monkeypatch.setattr(PieceQueue, "wait", wait_for_the_killed)
    report, content = run(path, machine=2, machines=3)
    # All but the piece of the stopped task was done when this one had to wait.
    assert waited == [1]
    assert content == reference[1]
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    for machine in (0, 2):
        assert run(path, machine=machine, machines=3) == (report, content)
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("removed", [False, True])
def test_a_task_that_starts_while_another_one_writes_the_report_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n' * 9)
    path = write(tmp_path / "p.yaml", tmp_path, inputs=[str(tmp_path / "in.jsonl")], steps=[])
    made = []

    def create_after_the_end(plan: Path, content: bytes) -> bool:
        monkeypatch.setattr(claim, "create_file", create_file)
        made.append(run(path, machine=0, machines=2))
        if not removed:
            plan.parent.mkdir()
            plan.write_bytes(content)
        return create_file(plan, content)

    monkeypatch.setattr(claim, "create_file", create_after_the_end)
    assert run(path, machine=1, machines=2) == made[0]
    assert not (tmp_path / "out" / ".parts").exists()


@pytest.mark.parametrize("tokenizer", [None, "bytes"])
def test_tasks_that_run_together_make_the_bytes_of_one(raw: Path, tmp_path: Path, tokenizer: str | None) -> None:
    path = write(tmp_path / "p.yaml", raw, shards=4, tokenizer=tokenizer)
    # The last is the same task, started twice.
    others = [start(path, machine, 3) for machine in (1, 2, 2)]
    _, content = run(path, machine=0, machines=3)
    for process in others:
        process.join()
    assert [process.exitcode for process in others] == [0, 0, 0]
    assert content == run(write(tmp_path / "alone" / "p.yaml", raw, shards=4, tokenizer=tokenizer))[1]
    assert not (tmp_path / "out" / ".parts").exists()


def test_with_a_tokenizer_the_output_is_a_corpus_of_the_same_documents(
    reference: tuple[CurationReport, dict[str, bytes]], raw: Path, tmp_path: Path
) -> None:
    report, _ = run(write(tmp_path / "p.yaml", raw, shards=3, tokenizer="bytes"))
    assert report is not None
    assert report.documents == reference[0].documents
    output = tmp_path / "out"
    assert not verify(output).faults
    corpus = open_corpus(output)
    assert corpus.manifest is not None
    assert corpus.manifest.documents == report.documents


def test_a_pipeline_that_changed_is_refused_and_so_is_a_finished_output(raw: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "p.yaml", raw, shards=3)
    unfinished = start(path, 0, 2, stops_at="part")
    wait_to_stop(unfinished)
    kill(unfinished)
    changed = write(tmp_path / "p.yaml", raw, shards=3, fields=["n"])
    with pytest.raises(ArgosyError, match="other options"):
        run(changed, machine=0, machines=2)
    report, content = run(changed, overwrite=True)
    assert run(changed) == (report, content)
    assert run(changed, machine=2, machines=3) == (report, content)
    with pytest.raises(ArgosyError, match="already holds"):
        run(write(tmp_path / "p.yaml", raw, shards=2))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"steps": ["gopher_qualty"]}, "did you mean gopher_quality"),
        ({"steps": [{"length": {"min_chars": 3}}]}, "did you mean steps.0.length.min_characters"),
        ({"steps": ["exact_duplicates", "length"]}, "put length before exact_duplicates"),
        ({"steps": [{"language": {"keep": ["xx"]}}]}, "known are en"),
        ({"fields": ["text"]}, "leave text out"),
        ({"key": "meta.body", "fields": ["meta"]}, "leave meta out"),
        ({"shards": 0}, "greater than or equal to 1"),
        ({"step": []}, "did you mean steps"),
    ],
)
def test_a_wrong_pipeline_is_refused_with_the_fix(
    raw: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgosyError) as refusal:
        read_pipeline(write(tmp_path / "p.yaml", raw, **keys))
    assert message in f"{refusal.value.cause} {refusal.value.fix}"


def shingles(text: str, n: int = 5) -> set[tuple[str, ...]]:
    words = [word.strip(".").lower() for word in text.split()]
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def test_near_duplicates_are_those_of_brute_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of every similarity from 0.4 to 1; the benchmark does the same with 100,000 documents."""
    rng = random.Random(1)
    texts = [prose(rng, rng.randrange(40, 400)) for _ in range(80)]
    for original in texts[:70]:
        words = original.split()
        for place in rng.sample(range(len(words)), int(len(words) * rng.random() * 0.08)):
            words[place] = rng.choice(PLAIN)
        texts.append(" ".join(words))
    sets = [shingles(text) for text in texts]
    true = {
        (a, b)
        for a in range(len(texts))
        for b in range(a + 1, len(texts))
        if len(sets[a] & sets[b]) >= 0.8 * len(sets[a] | sets[b])
    }
    step = NearDuplicates()
    for part, half in enumerate((texts[:100], texts[100:])):
        duplicate_search.write_marks(tmp_path, f"{part}", [step.mark(TextBatch(half))])
    duplicate_search.JobParts(("0", "1"), (100, len(texts) - 100)).write(tmp_path)
    for tasks in duplicate_search.searches(tmp_path, [step]):
        for task in tasks:
            task.run()
    pairs = np.concatenate([np.fromfile(path, "<u8") for path in sorted(tmp_path.glob("confirmed-*"))])
    found = {(int(pair >> np.uint64(32)), int(pair & np.uint64(0xFFFFFFFF))) for pair in pairs}
    assert len(true) >= 20
    # Sketches of whole documents are exact, so no pair is wrong.
    assert found <= true
    assert len(found) >= 0.97 * len(true)
    removed = set(duplicate_search.decide(tmp_path, [step]).documents.tolist())
    assert removed == {b for _, b in found}


def test_more_documents_than_a_pair_can_name_are_refused(tmp_path: Path) -> None:
    duplicate_search.forget_parts()
    duplicate_search.JobParts(("0",), (1 << 32,)).write(tmp_path)
    with pytest.raises(ArgosyError, match="cannot be compared"):
        next(duplicate_search.searches(tmp_path, [NearDuplicates()]))


def test_a_part_that_lost_documents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    path = write(tmp_path / "p.yaml", tmp_path, inputs=[str(tmp_path / "in.jsonl")], steps=["exact_duplicates"])
    kept = tmp_path / "out" / ".parts" / "00000-000000.kept"

    for content in (b"", zstandard.compress(b'{"text": "one"}\n'), b"\0" * 40):
        with monkeypatch.context() as patch:
            patch.setattr(WriteKept, "run", lambda task, content=content: task.path.write_bytes(content))
            with pytest.raises(ArgosyError, match="2 were written"):
                run(path)
        assert not (tmp_path / "out" / "curation.json").exists()
    kept.unlink()
    assert len(lines_of(run(path)[1])) == 2


def test_a_corpus_of_another_command_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "one"}')
    path = write(tmp_path / "p.yaml", tmp_path, inputs=[str(tmp_path / "in.jsonl")], steps=[], tokenizer="bytes")
    prepare([str(tmp_path / "in.jsonl")], ByteTokenizer(), tmp_path / "out", PrepareOptions(workers=1))
    with pytest.raises(ArgosyError, match="already holds"):
        run(path)
    assert run(path, overwrite=True)[0] is not None


def test_a_result_that_another_command_replaced_is_not_taken_for_the_own(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n' * 3)
    inputs = [str(tmp_path / "in.jsonl")]
    path = write(tmp_path / "p.yaml", tmp_path, inputs=inputs, steps=["exact_duplicates"], tokenizer="bytes")

    def share(machine: int, **options: Any) -> Any:
        sharing = {"workers": 1, "machine": machine, "machines": 2, "shards": 2} | options
        return prepare(inputs, ByteTokenizer(), tmp_path / "out", PrepareOptions(**sharing))

    share(0)
    assert share(1) == share(0)
    run(path, overwrite=True)
    with pytest.raises(ArgosyError, match="already holds"):
        share(0)
    share(0, overwrite=True, machines=1)
    with pytest.raises(ArgosyError, match="already holds"):
        run(path)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    ("content", "message"),
    [("", "the inputs hold no record"), ('{"text": "one"}', "the steps removed all 1 documents, length the most")],
)
def test_an_output_without_documents_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    steps = [{"length": {"min_characters": 9}}, "mask_pii", "gopher_quality", "exact_duplicates"]
    path = write(tmp_path / "p.yaml", tmp_path, inputs=[str(tmp_path / "in.jsonl")], steps=steps)
    with pytest.raises(ArgosyError, match=message):
        run(path)


def test_overwrite_refuses_while_another_process_works(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "one"}')
    keys: dict[str, Any] = {"inputs": [str(tmp_path / "in.jsonl")], "steps": [], "shards": 2}
    holder = start(write(tmp_path / "p.yaml", tmp_path, **keys), stops_at="part")
    wait_to_stop(holder)
    other = write(tmp_path / "p.yaml", tmp_path, **keys | {"examples": 1})
    with pytest.raises(ArgosyError, match="another process is making"):
        run(other, overwrite=True)
    assert (tmp_path / "out" / ".parts" / "locks").exists()
    kill(holder)
    assert run(other, overwrite=True)[0] is not None

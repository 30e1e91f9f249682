"""JSONL logs are append-only and survive a kill in the middle of a line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from argosy.record.jsonl import JsonlWriter, Record, read_jsonl, read_metrics
from argosy.record.tail import RecentRecords, Tail


@given(
    st.lists(
        st.dictionaries(st.text(max_size=5), st.integers(-(2**53), 2**53) | st.text(max_size=9) | st.none(), max_size=4)
    ),
    st.data(),
)
def test_a_log_cut_anywhere_loses_only_the_line_that_was_cut(
    records: list[dict[str, object]], data: st.DataObject
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "log.jsonl"
        path.touch()
        with JsonlWriter(path) as log:
            for record in records:
                log.write(record)
        cut = data.draw(st.integers(0, path.stat().st_size))
        whole = path.read_bytes()[:cut].count(b"\n")
        os.truncate(path, cut)
        with JsonlWriter(path) as log:
            log.write({"after": 1})
        found = list(read_jsonl(path))
    assert found[-1] == {"after": 1}
    kept = found[:-1]
    assert kept[:whole] == records[:whole]
    # A cut that removed only the newline leaves a complete record.
    assert len(kept) <= whole + 1


def test_nothing_written_is_ever_changed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n{"cut": ')
    with JsonlWriter(path) as log:
        log.write({"b": 2})
    assert path.read_bytes() == b'{"a": 1}\n{"cut": \n{"b":2}\n'
    assert list(read_jsonl(path)) == [{"a": 1}, {"b": 2}]


def test_a_killed_writer_leaves_a_readable_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    code = f"from pathlib import Path; from argosy.record.jsonl import JsonlWriter\nlog = JsonlWriter(Path({str(path)!r}))\ni = 0\nwhile True: log.write({{'step': i, 'pad': 'x' * 500}}); i += 1"
    process = subprocess.Popen([sys.executable, "-c", code])
    while not path.exists() or path.stat().st_size < 100_000:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    steps = [record["step"] for record in read_jsonl(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > 100


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from argosy.log_handler import install_log_handler
from argosy.record.jsonl import JsonlWriter
install_log_handler()
path = Path(sys.argv[1])
log = JsonlWriter(path)
log.write({"step": 1})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, resource.RLIM_INFINITY))
for step in range(2, 6):
    log.write({"step": step})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.write({"step": 6})
print(log.lost)
"""


def test_a_full_disk_is_announced_once_and_never_stops_the_run(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    result = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True)
    assert [record["step"] for record in read_jsonl(path)] == [1, 6]
    assert result.stderr.count("cannot be written") == 1
    assert result.stdout.strip() == "4"


def test_steps_logged_again_after_a_resume_replace_those_of_the_dead_attempt(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as log:
        for step, loss in [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0)]:
            log.write({"step": step, "loss": loss})
        log.write({"step": 4, "validation_loss": 6.5})
        # Resumed from step 2.
        for step, loss in [(3, 7.5), (4, 6.5)]:
            log.write({"step": step, "loss": loss})
    found = read_metrics(path)
    assert {step: record["loss"] for step, record in found.items()} == {1: 9.0, 2: 8.0, 3: 7.5, 4: 6.5}
    assert "validation_loss" not in found[4]


def test_training_and_validation_of_a_step_are_one_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as log:
        log.write({"step": 1, "loss": 2.0})
        log.write({"step": 1, "validation_loss": 3.0})
        log.write({"step": 2, "loss": 1.0})
    assert read_metrics(path) == {1: {"step": 1, "loss": 2.0, "validation_loss": 3.0}, 2: {"step": 2, "loss": 1.0}}


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert list(read_jsonl(tmp_path / "none.jsonl")) == []


def test_the_newest_records_are_kept_as_they_were_taken_and_forgotten_with_their_file(tmp_path: Path) -> None:
    path, taken = tmp_path / "events.jsonl", []

    def take(record: Record) -> Record | None:
        taken.append(record["n"])
        return record if record["n"] != 8 else None

    kept = RecentRecords(path, 3, take)
    assert kept.read() == []
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(7)) + '{"n":')
    assert [record["n"] for record in kept.read()] == [4, 5, 6]
    assert kept.read() == kept.read()
    # Each record is converted once, and dropped records are not converted.
    assert taken == [4, 5, 6]
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(10)))
    assert [record["n"] for record in kept.read()] == [6, 7, 9]
    path.write_text('{"n": 1}\n')
    assert [record["n"] for record in kept.read()] == [1]
    # Another run of the same name, which has more steps than this one.
    longer = tmp_path / "longer"
    longer.write_text("".join(f'{{"n": {n}}}\n' for n in range(20, 40)))
    longer.replace(path)
    assert [record["n"] for record in kept.read()] == [37, 38, 39]


def test_a_place_that_was_set_back_is_read_from_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(6)))
    tail = Tail(path)
    places = [place for _, place in tail.read(4)]
    # The state after the last two records could not be sent.
    tail.offset = places[1]
    assert [record["n"] for record, _ in tail.read()] == [2, 3, 4, 5]
    assert [record["n"] for record, _ in Tail(path, places[3]).read()] == [4, 5]

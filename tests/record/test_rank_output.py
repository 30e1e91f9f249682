"""A rank's output is forwarded unchanged and copied to its log, however the rank ends and whatever happens to the disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.record.rank_logs import last_words, newest_attempt, read_log
from argosy.record.relay import (
    ATTEMPTS_KEPT,
    BEGINNING,
    ENDING,
    MARK,
    LineSplitter,
    Log,
    LogWriter,
    RelayOptions,
    forget_old,
)  # fmt: skip
from waiting import PATIENCE_S, has_ended, wait_for

SIZED = "import os, time\nwhile not os.get_terminal_size(1).columns: time.sleep(0.01)\n"
RANK = """
import os, subprocess, sys, time
from pathlib import Path
from argosy.errors import ArgosyError
from argosy.record.rank_output import RankOutput

def begin():
    with (run / "events.jsonl").open("a") as events:
        events.write('{"event":"start","step":0,"time":%f}\\n' % time.time())

run = Path(sys.argv[1])
output = RankOutput(run, rank=int(sys.argv[2]), ranks=int(sys.argv[3]))
run.with_name("relay-id").write_text(str(output._relay.pid))
"""


def start(run: Path, does: str, *, rank: int = 0, ranks: int = 1, **options: object) -> subprocess.Popen[bytes]:
    run.mkdir(exist_ok=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
    return subprocess.Popen([sys.executable, "-c", RANK + does, str(run), str(rank), str(ranks)], **pipes)  # type: ignore[call-overload, no-any-return]


def wait_for_relay(run: Path) -> None:
    """Wait until the relay of the last rank has ended: a rank that is killed, or has waited long enough, ends before it."""
    relay = int(run.with_name("relay-id").read_text())
    wait_for(lambda: has_ended(relay))


def said(run: Path, does: str, **options: object) -> tuple[str, int]:
    """Run a rank and its relay. Return the rank's output, as its parent process sees it, and its exit code."""
    process = start(run, does, **options)
    text = process.communicate(timeout=PATIENCE_S)[0].decode()
    wait_for_relay(run)
    return text, process.returncode


def log(run: Path, attempt: int = 1, name: str = "0.log") -> list[str]:
    """Return the lines of a log that is complete, without those of the relay itself."""
    wait_for_relay(run)
    lines = (run / "logs" / str(attempt) / name).read_text().splitlines()
    return [line for line in lines if not line.startswith(MARK)]


def test_python_and_native_code_and_other_processes_are_heard_in_their_order(tmp_path: Path) -> None:
    does = """begin(); print("one", flush=True); os.write(2, b"two\\n"); subprocess.run(["echo", "three"])
print("four", file=sys.stderr); os.write(1, b"five"); sys.exit(7)"""
    text, code = said(tmp_path / "run", does)
    assert (text, code) == ("one\ntwo\nthree\nfour\nfive", 7)
    assert log(tmp_path / "run") == text.splitlines()
    first, *_, last = (tmp_path / "run/logs/1/0.log").read_text().splitlines()
    assert first.startswith(f"{BEGINNING}0 of 1 on {os.uname().nodename}, pid ")
    assert last.startswith(f"{ENDING}ended by itself")


@pytest.mark.parametrize(
    ("does", "ended_by", "last"),
    [
        ("os.write(2, b'all is lost'); os.kill(os.getpid(), 9)", signal.SIGKILL, "all is lost"),
        ("print('all is lost', flush=True); os.abort()", signal.SIGABRT, "all is lost"),
        ("import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)", signal.SIGSEGV, "  File"),
    ],
)
def test_the_last_words_of_one_that_dies_are_kept(does: str, ended_by: int, last: str, tmp_path: Path) -> None:
    text, code = said(tmp_path / "run", f"begin(); {does}")
    assert code == -ended_by
    path = tmp_path / "run/logs/1/0.log"
    assert log(tmp_path / "run") == text.splitlines()
    assert any(line.startswith(last) for line in log(tmp_path / "run"))
    assert path.read_text().splitlines()[-1].startswith(f"{ENDING}was ended, or crashed")
    if last == "all is lost":
        assert last_words(tmp_path / "run", 0) == ["logs/1/0.log: all is lost"]


def test_a_traceback_is_kept(tmp_path: Path) -> None:
    text, code = said(tmp_path / "run", "begin(); raise ValueError('seven of eight tins were empty')")
    assert code == 1
    assert log(tmp_path / "run") == text.splitlines()
    assert last_words(tmp_path / "run", 0, 1) == ["logs/1/0.log: ValueError: seven of eight tins were empty"]


def test_two_streams_stay_two(tmp_path: Path) -> None:
    process = start(tmp_path / "run", "begin(); print('out'); print('err', file=sys.stderr)", stderr=subprocess.PIPE)
    assert process.communicate(timeout=PATIENCE_S) == (b"out\n", b"err\n")
    assert sorted(log(tmp_path / "run")) == ["err", "out"]


def test_a_terminal_stays_a_terminal_and_bars_are_kept_as_they_were_seen_last(tmp_path: Path) -> None:
    does = """begin(); print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size(1))
for i in range(3): print(end=f"\\r\\x1b[2Kstep {i}", flush=True)
print(flush=True)
while os.get_terminal_size(1).columns == 97: time.sleep(0.05)
print(os.get_terminal_size(1))"""
    (tmp_path / "run").mkdir()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", SIZED + RANK + does, str(tmp_path / "run"), "0", "1"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 97, 0, 0))
    text = b""
    # Reading raises when the last writer has exited.
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 4096):
            text += data
            if text.endswith(b"step 2\r\n"):
                fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 55, 0, 0))
    assert os.waitpid(pid, 0)[1] == 0
    size = "os.terminal_size(columns={}, lines=31)"
    bar = "".join(f"\r\x1b[2Kstep {i}" for i in range(3))
    assert text.decode() == f"True True {size.format(97)}\r\n{bar}\r\n{size.format(55)}\r\n"
    assert log(tmp_path / "run") == [f"True True {size.format(97)}", "step 2", size.format(55)]


def test_one_that_speaks_without_end_is_kept_at_its_start_and_its_end(tmp_path: Path) -> None:
    does = "begin()\nfor i in range(30_000): print(f'line {i} {\"x\" * 100}')"
    text, code = said(tmp_path / "run", does, ranks=1 << 20)
    assert code == 0
    assert len(text) > 3_000_000
    pieces = {path.name: path.stat().st_size for path in (tmp_path / "run/logs/1").iterdir()}
    assert pieces.keys() == {"0.first.log", "0.before.log", "0.log"}
    assert max(pieces.values()) <= 256 << 10
    assert log(tmp_path / "run", name="0.first.log")[0].startswith("line 0 ")
    assert log(tmp_path / "run")[-1].startswith("line 29999 ")
    note = (tmp_path / "run/logs/1/0.log").read_text().splitlines()[0]
    assert note.startswith(f"{MARK}earlier lines are in 0.first.log and 0.before.log, without ")
    assert "a log keeps its first 256 KiB" in note


def test_a_line_without_end_fills_no_disk(tmp_path: Path) -> None:
    options = RelayOptions(0, 1 << 20, 1, "here", str(tmp_path), (0, 0.0), [], 2, [])
    file = Log(options, 1)
    file.write(b"x" * (2 << 20))
    (tmp_path / "logs/1/0.log").unlink()
    file.write(b"y" * (1 << 20))
    pieces = list((tmp_path / "logs/1").iterdir())
    assert len(pieces) == 3
    assert max(path.stat().st_size for path in pieces) <= 256 << 10
    assert (tmp_path / "logs/1/0.log").read_bytes().endswith(b"y")


def test_a_full_disk_costs_lines_of_the_log_and_nothing_else_and_is_told_once(tmp_path: Path) -> None:
    full = tmp_path / "run/logs/1"
    full.mkdir(parents=True)
    (full / "0.log").symlink_to("/dev/full")
    text, code = said(tmp_path / "run", "begin(); print('one', flush=True); time.sleep(2); print('two', flush=True); time.sleep(1); print('three')")  # fmt: skip
    lines = text.splitlines()
    assert code == 0
    assert [line for line in lines if not line.startswith("warning")] == ["one", "two", "three"]
    (warning,) = (line for line in lines if line.startswith("warning"))
    assert warning.startswith("warning: the log of rank 0 cannot be kept ([Errno 28] No space left on device")


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted in /proc")
def test_a_disk_that_stays_full_takes_no_files_away_from_the_relay(tmp_path: Path) -> None:
    full = tmp_path / "logs/1"
    full.mkdir(parents=True)
    (full / "0.log").symlink_to("/dev/full")
    ours, theirs = os.pipe()
    writer = LogWriter(RelayOptions(0, 1, 1, "here", str(tmp_path), (0, 0.0), [], theirs, []))
    opened, log = [], None
    for _ in range(5):
        # The next write tries again.
        writer._retry_at = 0.0
        log = writer._write(log, 1, b"one\n")
        opened.append(len(os.listdir("/proc/self/fd")))
    assert max(opened) == opened[0]
    assert os.read(ours, 1000).count(b"warning") == 1
    for fd in (ours, theirs):
        os.close(fd)


def test_a_file_system_that_does_not_answer_holds_up_nobody(tmp_path: Path) -> None:
    hung = tmp_path / "run/logs/1"
    hung.mkdir(parents=True)
    # Opening the pipe blocks until there is a reader, which never comes.
    os.mkfifo(hung / "0.log")
    process = start(tmp_path / "run", "begin()\nfor i in range(100_000): print('line', i, 'x' * 80)\nprint('done')")
    assert process.communicate(timeout=PATIENCE_S)[0].endswith(b"done\n")
    assert process.returncode == 0
    # Lets the relay exit.
    os.close(os.open(hung / "0.log", os.O_RDWR))


def test_a_reader_that_leaves_is_no_end_of_the_log(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    does = "begin(); print('one', flush=True); input(); print('two', flush=True); print('three')"
    process = start(tmp_path / "run", does, stdin=subprocess.PIPE, stdout=theirs)
    os.close(theirs)
    assert os.read(ours, 100) == b"one\n"
    os.close(ours)
    process.communicate(b"\n", timeout=PATIENCE_S)
    assert process.returncode == 0
    assert log(tmp_path / "run") == ["one", "two", "three"]


def test_where_the_relay_is_killed_the_rank_goes_on_and_says_so_once(tmp_path: Path) -> None:
    does = """begin(); print("one", flush=True); input(); os.kill(output._relay.pid, 9)
while output._relay.returncode is None: time.sleep(0.01)
for i in range(3): print(i, flush=True)"""
    process = start(tmp_path / "run", does, stdin=subprocess.PIPE)
    assert process.stdout is not None
    # The line was forwarded.
    assert process.stdout.readline() == b"one\n"
    text = process.communicate(b"\n", timeout=PATIENCE_S)[0].decode()
    assert process.returncode == 0
    assert text.count("the process that keeps this rank's log has ended") == 1
    assert text.splitlines()[1:] == ["0", "1", "2"]


def test_where_the_relay_is_killed_and_nobody_reads_any_more_the_rank_goes_on(tmp_path: Path) -> None:
    does = """begin(); input(); os.kill(output._relay.pid, 9)
while output._relay.returncode is None: time.sleep(0.01)
os._exit(7)"""
    ours, theirs = os.pipe()
    process = start(tmp_path / "run", does, stdin=subprocess.PIPE, stdout=theirs)
    for fd in (ours, theirs):
        os.close(fd)
    process.communicate(b"\n", timeout=PATIENCE_S)
    assert process.returncode == 7


def test_a_rank_that_is_writing_when_the_relay_is_killed_is_heard_to_its_end(tmp_path: Path) -> None:
    does = """begin(); os.kill(output._relay.pid, signal.SIGSTOP)
threading.Timer(0.5, os.kill, (output._relay.pid, signal.SIGKILL)).start()
for i in range(10_000): print("x" * 50)  # more than a pipe takes
sys.exit(7)"""
    text, code = said(tmp_path / "run", f"import signal, threading\n{does}")
    assert (text.count("x"), code) == (500_000, 7)


def test_what_a_rank_started_is_heard_after_it_was_killed(tmp_path: Path) -> None:
    child = """import os, sys, time
while os.getppid() == int(sys.argv[1]): time.sleep(0.01)
print("still here", flush=True)"""
    does = f"""begin(); subprocess.Popen([sys.executable, "-c", {child!r}, str(os.getpid())])
os.write(1, b"gone\\n"); os.kill(os.getpid(), 9)"""
    text, _ = said(tmp_path / "run", does)
    assert text == "gone\nstill here\n"
    assert log(tmp_path / "run") == ["gone", "still here"]


def test_lines_of_many_ranks_are_not_mixed(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    does = "begin(); rank = sys.argv[2]\nfor i in range(300): print(rank * 200)\nfor i in range(300): os.write(2, rank.encode() * 150 + b'\\n')"
    ranks = [start(tmp_path / "run", does, rank=rank, ranks=3, stdout=theirs, stderr=theirs) for rank in range(3)]
    os.close(theirs)
    with os.fdopen(ours) as file:
        lines = file.read().splitlines()
    assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0, 0]
    assert sorted(set(lines)) == sorted(f"{r}" * n for r in range(3) for n in (150, 200))
    assert len(lines) == 1800


def test_each_time_that_training_begins_is_an_attempt(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said(run, "begin(); print('first')")
    said(run, "with output: begin(); print('second')")
    said(run, "with output: raise ArgosyError('run.busy', 'refused', fix='')")
    said(run, "with output: print('nothing is left to do')")
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["1", "2"]
    said(run, "with output: raise RuntimeError('it never began')")
    said(run, "begin(); print('third')")
    assert (log(run, 1), log(run, 2)) == (["first"], ["second"])
    assert "RuntimeError: it never began" in log(run, 3)
    # No lines of the start before.
    assert last_words(run, 0) == ["logs/3/0.log: third"]


def test_a_run_that_was_moved_aside_keeps_its_logs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said(run, "begin(); print('first')")
    said(run, "run.rename(f'{run}.old'); run.mkdir(); begin(); print('fresh')")
    assert (log(run), log(tmp_path / "run.old")) == (["fresh"], ["first"])


def test_a_refused_start_leaves_no_directory(tmp_path: Path) -> None:
    text, _ = said(tmp_path / "run", "run.rmdir(); print('refused')")
    assert text == "refused\n"
    assert not (tmp_path / "run").exists()


def test_old_attempts_go_and_what_is_not_a_log_stays(tmp_path: Path) -> None:
    for number in range(1, 16):
        (tmp_path / "logs" / str(number)).mkdir(parents=True)
        (tmp_path / "logs" / str(number) / "0.log").write_text("")
    (tmp_path / "logs/3/notes.txt").write_text("mine")
    (tmp_path / "logs/pods").mkdir()
    forget_old(str(tmp_path / "logs"), 15)
    kept = {str(number) for number in range(16 - ATTEMPTS_KEPT, 16)}
    assert {path.name for path in (tmp_path / "logs").iterdir()} == kept | {"3", "pods"}
    assert newest_attempt(tmp_path) == tmp_path / "logs/15"


@settings(deadline=None)
@given(st.text(alphabet="ab\r\n\x1b[2K", max_size=60).map(str.encode), st.data())
def test_how_text_is_cut_up_on_its_way_does_not_matter(text: bytes, data: st.DataObject) -> None:
    whole, parts = LineSplitter(), LineSplitter()
    expected = whole.feed(text) + whole.end()
    got, rest = b"", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        got, rest = got + parts.feed(rest[:size]), rest[size:]
    assert got + parts.end() == expected
    assert expected.count(b"\n") in (text.count(b"\n"), text.count(b"\n") + 1)
    if not set(b"\r\x1b") & set(text):
        assert expected == (text if text.endswith(b"\n") or not text else text + b"\n")


def test_a_log_is_followed_from_piece_to_piece_and_from_attempt_to_attempt_until_the_run_has_ended(
    tmp_path: Path,
) -> None:
    run, lines = tmp_path / "run", list[str]()
    run.mkdir()
    reader = threading.Thread(target=lambda: lines.extend(read_log(run, 0, follow=True)))
    reader.start()
    does = "begin()\nfor i in range(4000): print(f'line {i} {\"x\" * 100}')"
    said(run, does, ranks=1 << 20)
    wait_for(lambda: lines and lines[-1].startswith(ENDING))
    does = "begin(); print('again', flush=True); input(); print('over')"
    second = start(run, does, stdin=subprocess.PIPE)
    wait_for(lambda: lines[-1] == "again")
    second.communicate(b"\n", timeout=PATIENCE_S)
    wait_for(lambda: lines[-1].startswith(ENDING))
    assert reader.is_alive()
    with (run / "events.jsonl").open("a") as events:
        events.write('{"event":"done","step":3,"time":1}\n')
    reader.join(PATIENCE_S)
    spoken = [line for line in lines if not line.startswith(MARK)]
    assert spoken == [f"line {i} {'x' * 100}" for i in range(4000)] + ["again", "over"]
    assert next(read_log(run, 0, tail=2)) == "over"
    assert list(read_log(run, 1)) == []


@pytest.mark.parametrize("tail", [0, 1, None])
def test_the_log_of_a_run_that_has_ended_is_followed_to_its_end_whoever_spoke_last(
    tail: int | None, tmp_path: Path
) -> None:
    (tmp_path / "logs/1").mkdir(parents=True)
    lines = [f"{BEGINNING}0 of 1", "one", f"{ENDING}ended by itself", "a process that outlived it"]
    (tmp_path / "logs/1/0.log").write_text("\n".join(lines) + "\n")
    (tmp_path / "events.jsonl").write_text('{"event":"start","time":1}\n{"event":"done","time":2}\n')
    followed = list[str]()
    reader = threading.Thread(
        target=lambda: followed.extend(read_log(tmp_path, 0, tail=tail, follow=True)), daemon=True
    )
    reader.start()
    reader.join(PATIENCE_S)
    assert not reader.is_alive()
    assert followed == (lines if tail is None else lines[len(lines) - tail :])


def test_a_log_is_followed_into_the_run_that_was_begun_anew_in_its_place(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said(run, "begin(); print('first')")
    followed = read_log(run, 0, follow=True)
    assert next(followed).startswith(BEGINNING)
    said(run, "run.rename(f'{run}.old'); run.mkdir(); begin(); print('fresh')")
    with (run / "events.jsonl").open("a") as events:
        events.write('{"event":"done","step":3,"time":1}\n')
    assert [line for line in followed if not line.startswith(MARK)] == ["first", "fresh"]

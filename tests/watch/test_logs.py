"""The doctor on real-life logs: ranks that write at the same time, one cause and many consequences, gigabytes of step lines."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.record.rundir import RunDir
from argosy.watch.diagnosis import diagnose
from argosy.watch.finding import Finding
from argosy.watch.run_list import Run
from argosy.watch.suspects import suspects
from watch.test_doctor import beat, event, started

Argosy = Callable[..., subprocess.CompletedProcess[str]]
WATCHDOG = "[rank{0}]:[E1112 10:01:01 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=99, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600004 milliseconds"
OOM = "[rank{0}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {0} has a total capacity of 79.11 GiB"
LOST = "[rank{0}]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.{0}]:1"


def write(run: RunDir, name: str, *lines: str) -> Path:
    path = run.root / "logs" / "0" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def first(run: RunDir, *logs: Path) -> Finding:
    return diagnose(Run(run.root.name, run.root), logs)[0]


def test_one_rank_out_of_memory_is_told_and_not_the_seven_that_waited_for_it(tmp_path: Path) -> None:
    run = started(tmp_path)
    waiting = [WATCHDOG.format(rank) for rank in range(8) if rank != 3]
    write(run, "pod.log", *waiting[:4], OOM.format(3), *waiting[4:], LOST.format(0))
    assert first(run).verdict.startswith("rank 3: a GPU ran out of memory at step 31")


def test_the_rank_is_known_by_the_name_of_its_log(tmp_path: Path) -> None:
    run = started(tmp_path)
    write(run, "3.log", OOM.format(3).removeprefix("[rank3]: "))
    for rank in (0, 1, 2):
        path = write(run, f"{rank}.log", WATCHDOG.format(rank))
        # These ranks wrote last.
        os.utime(path, (time.time() + 60 + rank,) * 2)
    found = diagnose(Run(run.root.name, run.root))
    assert found[0].verdict.startswith("rank 3: a GPU ran out of memory")
    assert found[1].verdict.startswith("ranks 0, 1, 2: a rank waited in a collective")
    assert len([finding for finding in found if finding.name == "nccl-watchdog"]) == 1


def test_where_nothing_says_why_the_complaint_of_the_others_counts(tmp_path: Path) -> None:
    run = started(tmp_path)
    write(run, "pod.log", *(WATCHDOG.format(rank) for rank in range(6)))
    assert first(run).name == "nccl-watchdog"
    assert first(run).verdict.startswith("ranks 0, 1, 2, 3 and 2 more: ")


def test_what_the_kernel_says_explains_the_death_of_a_rank(tmp_path: Path) -> None:
    run = started(tmp_path)
    event(run, "rank-died", rank=1, cause="ended by SIGKILL", phase="data")
    dmesg = tmp_path / "dmesg"
    dmesg.write_text("[1.0] Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB\n")
    assert first(run).name == "rank-died"
    assert first(run, dmesg).name == "host-oom-kernel"


def test_a_rank_that_died_of_a_known_cause_is_told_with_it_and_the_plan(tmp_path: Path) -> None:
    run = started(tmp_path)
    (run.root / "plan.json").write_text('{"plans": [{"memory_gib": [{"device": 71.2}]}]}')
    event(run, "rank-died", rank=5, cause="it lost its connection: Connection closed by peer", phase="optimizer")
    trace = "Traceback (most recent call last):\n" + OOM.format(2)
    event(run, "rank-died", rank=2, cause=OOM.format(2), error=trace, phase="forward_backward")
    event(run, "gave-up", reason="4 restarts in a row brought no new checkpoint", cause="rank 2")
    assert first(run).verdict == (
        "rank 2 died at step 31 in forward_backward: a GPU ran out of memory at step 31: plan said 71 GiB, see `argosy plan --explain`"
    )


@pytest.mark.parametrize("line", ["\x1b[31mtorch.OutOfMemoryError\x1b[0m: CUDA out of\x1b[1m memory", "\x1b[38;5;196mCUDA out\x1b[0m of memory."])  # fmt: skip
def test_colours_do_not_hide_a_cause(line: str, tmp_path: Path) -> None:
    run = started(tmp_path)
    write(run, "0.log", line)
    assert first(run).name == "cuda-oom"
    assert "\x1b" not in "".join(first(run).evidence)


def test_a_cause_in_the_middle_of_a_long_log_is_found(tmp_path: Path) -> None:
    run = started(tmp_path)
    path = write(run, "0.log", "node1:42:60 [0] NCCL INFO Using network Socket")
    steps = "".join(f"step {step}/200000 | loss {1 / step:.4f} | grad norm 0.3\n" for step in range(1, 200_000))
    with path.open("a") as file:
        file.write(steps + OOM.format(0) + "\n")
        for number in range(100_000):
            file.write(f"{WATCHDOG.format(number % 8)} {number}\n")
    found = [finding.name for finding in diagnose(Run(run.root.name, run.root))]
    assert found[:2] == ["cuda-oom", "nccl-watchdog"]
    assert "nccl-tcp-fallback" in found


def test_of_a_log_beyond_all_bounds_the_start_and_the_end_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [f"line {letter * 8} of many" for letter in map(chr, range(97, 123))]
    path.write_text("\n".join(lines))
    read = suspects(path, 100, 1000)
    assert read[0] == lines[0]
    assert read[-1] == lines[-1]
    assert lines[12] not in read
    assert suspects(path, 1 << 20, 1000) == lines
    assert suspects(path, 1 << 20, 9) == [*lines[:3], *lines[-6:]]
    assert suspects(tmp_path / "none", 100, 100) == []


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    run, pipe = started(tmp_path), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(
        target=pipe.write_text, args=("NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.\n",)
    )
    writer.start()
    assert first(run, pipe).name == "xid-79"
    writer.join()


RETRIED = (
    "[W socket.cpp:663] [c10d] The client socket has failed to connect to [run1-0]:29500 (errno: 111 - Connection refused).",
    "[W socket.cpp:663] [c10d] The IPv6 network addresses of (run1-0.run1, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
    "huggingface_hub: 429 Client Error: Too Many Requests; retrying in 4s",
)


def test_what_was_tried_again_is_no_verdict_on_a_run_that_trains(tmp_path: Path) -> None:
    run = started(tmp_path)
    beat(run, 0)
    write(run, "0.log", *RETRIED)
    found = diagnose(Run(run.root.name, run.root))
    assert [finding.name for finding in found] == ["running"]


def test_what_was_tried_again_is_no_verdict_on_a_run_that_trained_and_was_killed(tmp_path: Path) -> None:
    run = started(tmp_path)
    beat(run, 0, alive=False)
    write(run, "0.log", *RETRIED)
    assert first(run).name == "rank-died"


def test_a_known_cause_in_a_run_that_trains_all_the_same_is_told_as_such(tmp_path: Path) -> None:
    run = started(tmp_path)
    beat(run, 0)
    write(run, "0.log", OOM.format(0))
    assert first(run).verdict.endswith("; the run goes on")


@pytest.mark.parametrize(("hosts", "told"), [(["a", "a"], False), (["a", "b"], True)])
def test_sockets_are_news_between_nodes_only(hosts: list[str], told: bool, tmp_path: Path) -> None:
    run = started(tmp_path)
    for rank, host in enumerate(hosts):
        beat(run, rank, host=host)
    write(run, "0.log", "node1:42:60 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>")
    assert (first(run).name == "nccl-tcp-fallback") is told


def test_an_error_nobody_has_described_is_quoted(tmp_path: Path) -> None:
    run = started(tmp_path)
    write(
        run, "2.log", "Traceback (most recent call last):", "[rank2]: argosy.NewError: seven of eight tins were empty"
    )
    assert (
        "a process ended with an error: [rank2]: argosy.NewError: seven of eight tins were empty" in first(run).verdict
    )


def test_a_log_is_read_from_standard_input_and_shown_without_commands_to_the_terminal(
    tmp_path: Path, argosy: Argosy
) -> None:
    run = started(tmp_path)
    done = argosy("doctor", run.root, "--log", "-", input="\x1b]0;owned\x07 CUDA out of memory \x1b[2J\n")
    assert done.returncode == 0
    assert done.stdout.startswith("a GPU ran out of memory at step 31 (stdin)")
    assert "\x1b" not in done.stdout
    refused = argosy("doctor", run.root, "--log", tmp_path)
    assert refused.returncode == 2
    assert "is not a file" in refused.stderr


def test_what_ranks_say_while_they_stop_as_asked_is_no_verdict(tmp_path: Path) -> None:
    run = started(tmp_path)
    event(run, "interrupted", signal="SIGTERM")
    write(run, "0.log", LOST.format(1), "[W] Received Signals.SIGTERM death signal, shutting down workers")
    assert first(run).name == "stopped"
    write(run, "1.log", "slurmstepd: error: *** JOB 8 ON n3 CANCELLED AT 2026-11-12T01:01:01 DUE TO TIME LIMIT ***")
    # Slurm asked for the stop.
    assert first(run).name == "slurm-time-limit"


def test_only_the_newest_attempt_counts_and_of_it_the_last_start(tmp_path: Path) -> None:
    run = started(tmp_path)
    for attempt, lines in ((2, ("OSError: [Errno 28] No space left on device",)), (10, (OOM.format(1), "-- argosy: rank 1 of 2 on n1", LOST.format(1)))):  # fmt: skip
        (run.root / "logs" / str(attempt)).mkdir(parents=True)
        (run.root / "logs" / str(attempt) / "1.log").write_text("\n".join(lines))
    found = diagnose(Run(run.root.name, run.root))
    assert found[0].name == "nccl-remote-closed"
    assert not {"disk-full", "cuda-oom"} & {finding.name for finding in found}


def test_what_the_events_say_is_told_once_with_the_log_as_evidence(tmp_path: Path) -> None:
    run = started(tmp_path)
    event(run, "rank-died", rank=1, cause=OOM.format(1), error=OOM.format(1), phase="optimizer")
    write(run, "1.log", OOM.format(1))
    found = diagnose(Run(run.root.name, run.root))
    assert [finding.name for finding in found].count("cuda-oom") == 1
    assert any(line.startswith("logs/0/1.log: ") for line in found[0].evidence)


def test_a_refusal_in_a_log_is_not_told_over_the_event_that_has_it(tmp_path: Path) -> None:
    run = started(tmp_path)
    event(run, "failed", rank=0, code="train.non-finite", cause="the loss is nan", fix="lower optim.lr")
    write(run, "0.log", "error[train.non-finite]", "  cause  the loss is nan", "  fix    lower optim.lr")
    assert first(run).verdict.startswith("rank 0 ended at step")


def test_the_last_words_of_a_rank_that_was_killed_are_shown(tmp_path: Path) -> None:
    run = started(tmp_path)
    beat(run, 0, alive=False)
    write(run, "0.log", "-- argosy: rank 0 of 1 on n1", "one", "two", "all is lost", "-- argosy: it was ended")
    assert first(run).evidence[-1] == "logs/0/0.log: all is lost"


def test_of_very_many_ranks_the_one_that_fell_silent_first_is_heard(tmp_path: Path) -> None:
    run = started(tmp_path)
    for rank in range(300):
        path = write(run, f"{rank}.log", OOM.format(7) if rank == 7 else WATCHDOG.format(rank))
        os.utime(path, (time.time() + 60 + (0 if rank == 7 else rank),) * 2)
    assert first(run).verdict.startswith("rank 7: a GPU ran out of memory")

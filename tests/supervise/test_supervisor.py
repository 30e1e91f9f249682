"""The supervisor finds the rank that blocks the others, and limits the number of restarts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from argosy.config.survival import FaultSpec
from argosy.errors import EXIT_BUG, EXIT_REFUSED, EXIT_RESUMABLE
from argosy.record.heartbeat import Heartbeat
from argosy.record.jsonl import read_jsonl
from argosy.record.rundir import RunDir
from argosy.supervise.evidence import Witness, find_culprit, find_mismatch, new_debug_directory, relevant_thread
from argosy.supervise.rank_process import RankFiles, write_atomically
from argosy.supervise.supervisor import Supervisor


def began(number: int, name: str = "gloo:all_reduce", sizes: object = ((4,),)) -> dict[str, Any]:
    return {
        "collective_seq_id": number, "record_id": number, "profiling_name": name, "input_sizes": sizes,
        "input_dtypes": ["Float"], "process_group": ["0", "default_pg"], "is_p2p": False,
    }  # fmt: skip


def witness(rank: int, *entries: dict[str, Any], state: str = "S", silent: bool = False) -> Witness:
    return Witness(rank, state, "", None if silent else list(entries))


@pytest.mark.parametrize(
    ("witnesses", "rank", "why"),
    [
        ([witness(0, began(1), began(2)), witness(1, began(1))], 1, "rank 0 waits in all_reduce (4,) float, number 2"),
        ([witness(0, began(1)), witness(1, began(1), state="T")], 1, "stopped"),
        ([witness(0, began(1), state="D"), witness(1, began(1))], 0, "file system"),
        ([witness(0, began(1)), witness(1, silent=True)], 1, "interpreter's lock"),
        ([witness(0, began(1)), witness(1, began(1))], 1, "least far"),
        ([witness(0)], 0, "only rank"),
    ],
)
def test_the_rank_that_holds_up_the_others_is_named(witnesses: list[Witness], rank: int, why: str) -> None:
    found, reason = find_culprit(witnesses, {0: 7, 1: 6} if len(witnesses) > 1 else {0: 7})
    assert found == rank
    assert why in reason


def test_different_collectives_under_one_number_are_a_mismatch_and_different_numbers_are_not() -> None:
    assert find_mismatch([witness(0, began(1), began(2)), witness(1, began(1))]) is None
    found = find_mismatch([witness(0, began(1), began(2)), witness(1, began(1), began(2, "gloo:broadcast"))])
    assert found is not None
    assert "rank 0 began all_reduce" in found
    assert "rank 1 began broadcast" in found
    assert find_mismatch([witness(0, began(1)), witness(1, began(1, sizes=((5,),)))]) is not None
    scattered = began(1, "gloo:scatter", ((2, 2),)), began(1, "gloo:scatter", ())
    assert find_mismatch([witness(0, scattered[0]), witness(1, scattered[1])]) is None, (
        "only the first rank has something to scatter"
    )
    other_group = began(1, "gloo:broadcast") | {"process_group": ["7", "default_pg"]}
    assert find_mismatch([witness(0, began(1)), witness(1, other_group)]) is None


def test_of_all_threads_the_one_that_crashed_is_shown_and_else_the_main_one() -> None:
    crash = "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  a\n\nCurrent thread 0x2:\n  b\n\nThread 0x3:\n  c\n\nExtension modules: x"
    assert relevant_thread(crash) == "Current thread 0x2:\n  b"
    assert relevant_thread("Current thread 0x1:\n  a\n\nThread 0x3:\n  main") == "Thread 0x3:\n  main"
    assert relevant_thread("") == ""


class Attempts:
    """A supervisor whose one rank ends as a test says."""

    def __init__(self, root: Path, **spec: Any) -> None:
        self.run = RunDir(root / "run")
        self.run.root.mkdir()
        self.supervisor = Supervisor(root / "scratch", self.run, FaultSpec(backoff=0, **spec))
        self.supervisor.begin()

    def end(self, *, step: int, first: int = 0, error: str | None = None, code: int = 1) -> bool:
        """Let the rank resume after step `first` and end at `step`. Returns whether it will be restarted."""
        files = self.supervisor.files
        heartbeat = Heartbeat(page=files.page(0))
        heartbeat.begin(first)
        heartbeat.enter("data", step)
        if error is not None:
            write_atomically(files.error(0), error)
        again = self.supervisor.failed({0: code})
        heartbeat.close()
        if again:
            self.supervisor.restarting({})
        return again

    def events(self) -> list[str]:
        return [event["event"] for event in read_jsonl(self.run.events)]


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    RankFiles.forget()


def test_one_step_that_kills_it_again_and_again_is_not_tried_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = Attempts(tmp_path, same_step=3)
    error = "Traceback (most recent call last):\nValueError: broken"
    ends = [attempts.end(step=7, first=first, error=error) for first in (0, 5, 5)]
    assert ends == [True, True, False], "a checkpoint before that step is no way past it"
    assert attempts.events() == ["rank-died", "restart"] * 2 + ["rank-died", "gave-up"]
    assert attempts.supervisor.failure is not None
    assert attempts.supervisor.failure.code == EXIT_BUG
    said = caplog.text
    assert said.count("Traceback") == 1
    assert "step 7 has ended it 3 times" in said


def test_restarts_are_counted_from_the_last_new_checkpoint(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, restarts=2)
    ends = [attempts.end(step=step, first=first) for step, first in ((5, 0), (6, 0), (14, 10), (13, 10), (12, 10))]
    assert ends == [True, True, True, True, False], (
        "the third goes on from a new checkpoint, and the count begins again"
    )


def test_waits_between_restarts_double_up_to_a_minute(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, RunDir(tmp_path / "run"), FaultSpec(backoff=1.5))
    waits = []
    for restarts in range(1, 9):
        supervisor._restarts = restarts
        waits.append(supervisor._wait())
    assert waits == [1.5, 3, 6, 12, 24, 48, 60, 60]


def test_a_refusal_is_told_and_never_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempts = Attempts(tmp_path)
    assert not attempts.end(step=0, error="error[config.bad-value]\n  cause  no", code=EXIT_REFUSED)
    assert attempts.supervisor.failure is not None
    assert attempts.supervisor.failure.code == EXIT_REFUSED
    assert "rank 0: error[config.bad-value]" in caplog.text
    assert attempts.events() == []


NCCL_LOST_ITS_PEER = """torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2582, remote process exited or there was a \
network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketPollConnect: connect to fe80::1<1> returned an error"""


@pytest.mark.parametrize("lost", ["RuntimeError: Connection closed by peer [127.0.0.1]:1", NCCL_LOST_ITS_PEER])
@pytest.mark.parametrize("later", [0, 1])
def test_a_rank_that_lost_its_connection_is_not_taken_for_the_one_that_failed(
    tmp_path: Path, later: int, lost: str
) -> None:
    attempts = Attempts(tmp_path)
    files = attempts.supervisor.files
    write_atomically(files.error(0), f'Traceback (most recent call last):\n  File "step.py", line 1, in step\n{lost}')
    write_atomically(files.error(1), "Traceback (most recent call last):\nValueError: broken")
    # Within one tick of the file system's clock, or in reverse order.
    for rank in (0, 1):
        os.utime(files.error(rank), ns=(10**18 + later * rank,) * 2)
    assert attempts.supervisor.failed({0: 1, 1: 1})
    assert attempts.supervisor.failure is not None
    assert (attempts.supervisor.failure.rank, attempts.supervisor.failure.cause) == (1, "ValueError: broken")


@pytest.mark.parametrize(
    ("code", "error", "rank"),
    [
        (-signal.SIGABRT, "ValueError: broken", 1),
        (-signal.SIGABRT, NCCL_LOST_ITS_PEER, 0),
        (-signal.SIGKILL, "ValueError: broken", 0),
    ],
)
def test_a_rank_that_nccl_aborted_is_not_taken_for_the_one_that_failed(
    tmp_path: Path, code: int, error: str, rank: int
) -> None:
    """One that was killed is."""
    attempts = Attempts(tmp_path)
    write_atomically(attempts.supervisor.files.error(1), f"Traceback (most recent call last):\n{error}")
    assert attempts.supervisor.failed({0: code, 1: 1})
    assert attempts.supervisor.failure is not None
    assert attempts.supervisor.failure.rank == rank


@pytest.mark.parametrize(("saved", "code"), [(True, EXIT_RESUMABLE), (False, 128 + signal.SIGTERM)])
def test_a_stop_asked_for_while_it_waits_to_start_again_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool, code: int
) -> None:
    attempts = Attempts(tmp_path)
    supervisor = attempts.supervisor
    supervisor.spec = FaultSpec(backoff=3600)
    if saved:
        (attempts.run.checkpoints / "step-00000005").mkdir(parents=True)
    # A process id that does not exist.
    write_atomically(supervisor.files.pid(0), str(2**22 + 1))
    assert supervisor.failed({0: 1})
    monkeypatch.setattr(time, "sleep", lambda seconds: supervisor.forward(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        supervisor.restarting({})
    assert supervisor.stopped_between() == code


def test_a_stop_asked_for_before_any_rank_has_begun_stops_it(tmp_path: Path) -> None:
    supervisor = Attempts(tmp_path).supervisor
    with pytest.raises(KeyboardInterrupt):
        supervisor.forward(signal.SIGTERM)
    assert supervisor.stopped_between() == 128 + signal.SIGTERM


def test_nodes_that_notice_in_the_same_second_do_not_write_over_each_others_evidence(tmp_path: Path) -> None:
    first, second = (new_debug_directory(tmp_path / "debug", "20260101-000000-attempt-0") for _ in range(2))
    assert first != second
    assert first.is_dir()
    assert second.is_dir()

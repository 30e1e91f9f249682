"""The supervisor of one node's ranks: detects a dead or stalled rank, saves evidence, and decides whether to restart.

A rank stalls when it stays in one phase for longer than `fault.stall_after` and than four times the longest time that the
phase took before. A restart restarts all ranks of the job from the last good checkpoint. The supervisor gives up after
`fault.restarts` restarts in a row without a new checkpoint, or when one step fails `fault.same_step` times.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from argosy.config.survival import FaultSpec
from argosy.errors import EXIT_BUG, EXIT_REFUSED, EXIT_RESUMABLE
from argosy.record.jsonl import JsonlWriter, now, read_jsonl
from argosy.record.pulse import Page, RankProgress, process_state
from argosy.record.rank_logs import last_words
from argosy.record.rundir import RunDir
from argosy.retry import RetryPolicy
from argosy.supervise.evidence import (
    Witness,
    collect_evidence,
    find_culprit,
    find_mismatch,
    find_waited_for,
    new_debug_directory,
    relevant_thread,
    save_evidence,
)
from argosy.supervise.rank_process import RankFiles

_log = logging.getLogger(__name__)
# A phase may take this many times its longest duration so far.
_STALL_FACTOR = 4.0
_LONGEST_WAIT_S = 60.0
_POLL_S = 0.1
_MEMORY_EVERY_S = 1.0
# Lines of a dead rank's log that are searched. NCCL writes a page of native stack after its message.
_LAST_WORDS = 200
# Seconds until the log has what the rank wrote before it aborted.
_LOG_S = 2.0
_COLLECTIVE = re.compile(r"distributed_c10d\.py\", line \d+ in (\w+)")
# Messages of gloo and NCCL about a lost peer. They are a consequence; the peer's node reports the cause.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Broken pipe|remote process exit|Connection refused|[Cc]onnect timeout"
)
# Messages of gloo and NCCL about a collective that took too long. The rank that has not begun it is to blame.
_TIMED_OUT = re.compile(r"Timed out waiting|Watchdog caught collective operation timeout")


@dataclass
class RankFailure:
    """The reason why the ranks of an attempt were killed. `kind` is rank-died or stall; `seconds` is the length of the stall."""

    kind: str
    rank: int
    cause: str
    step: int
    phase: str
    seconds: float = 0.0
    stack: str = ""
    collective: str | None = None
    error: str | None = None
    debug: str | None = None
    code: int = EXIT_BUG
    # Ranks that still lived when this one died.
    witnesses: list[Witness] = field(default_factory=list)

    def facts(self) -> dict[str, object]:
        found = {
            "rank": self.rank, "cause": self.cause, "phase": self.phase, "seconds": round(self.seconds, 1),
            "stack": self.stack.splitlines(), "collective": self.collective, "error": self.error, "debug": self.debug,
        }  # fmt: skip
        return {key: value for key, value in found.items() if value or key == "rank"}

    def __str__(self) -> str:
        return f"rank {self.rank} at step {self.step} ({self.phase}): {self.cause}"


@dataclass
class Supervisor:
    """The supervisor of one node. torch's elastic agent calls its hooks `look`, `failed` and `restarting`."""

    scratch: Path
    run: RunDir
    spec: FaultSpec
    attempt: int = 0
    # Signals received that ask for a stop.
    signals: list[int] = field(default_factory=list)
    failure: RankFailure | None = None
    # Whether the exit code is decided.
    ended: bool = False
    # Restarts since the last new checkpoint.
    _restarts: int = 0
    _at_step: Counter[int] = field(default_factory=Counter)
    _first: int = -1
    _pages: dict[int, Page] = field(default_factory=dict)
    _memory: dict[int, deque[int]] = field(default_factory=dict)
    _memory_at: float = 0.0
    _oom_kills: int = 0
    _shown: set[str] = field(default_factory=set)
    _started: float = field(default_factory=time.time)
    # Wall-clock time of the first signal.
    _asked_at: float = 0.0

    def begin(self) -> None:
        """Prepare an attempt. The agent starts its ranks next."""
        self.files = RankFiles(self.scratch / f"attempt-{self.attempt}")
        self.files.announce(self.attempt)
        self.failure, self._pages, self._memory, self._oom_kills = None, {}, {}, _oom_kills()

    def begin_again(self) -> None:
        self.attempt += 1
        self.begin()
        # The signal came when no rank was running.
        if self.signals:
            raise KeyboardInterrupt

    @property
    def has_run(self) -> bool:
        """True if ranks of this attempt have started."""
        return bool(self._pages)

    def forward(self, number: int) -> None:
        """Forward a stop signal to the ranks. They get all the time they need; a second signal ends them at once."""
        if self.ended:
            return
        self._asked_at = self._asked_at or time.time()
        self.signals.append(number)
        pids = self.files.pids()
        if not pids:
            # No rank has started yet. The agent ends them.
            raise KeyboardInterrupt
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # Hooks that torch's elastic agent calls.

    def look(self, ranks: dict[int, int]) -> None:
        if self.failure is None:
            self._watch_memory(ranks)
            dead = [rank for rank, pid in ranks.items() if self._has_failed(rank, pid)]
            stalled = {} if dead else self._stalled(ranks)
            # A rank without an error file was killed; others may have failed because of it.
            if dead:
                self.failure = self._died(min(dead, key=lambda rank: (self.files.error(rank).exists(), rank)), ranks)
            elif stalled:
                self.failure = self._stall(stalled, ranks)
            if self.failure is not None:
                _end(ranks)

    def failed(self, exit_codes: dict[int, int]) -> bool:
        # The rank died after the last look.
        if self.failure is None:
            self.failure = self._died(min(exit_codes, key=lambda rank: (exit_codes[rank] >= 0, rank), default=0), {})
        failure = self.failure
        if failure.kind == "rank-died":
            self._explain(failure, exit_codes)
            self._blame_for_timeout(failure)
        if failure.code == EXIT_REFUSED and failure.error is not None:
            return self._stop(f"rank {failure.rank}: {failure.error}")
        self._event(failure.kind, failure.step, **failure.facts())
        if self.signals:
            return self._stopped(failure)
        return self._may_restart(failure)

    def restarting(self, ranks: dict[int, int]) -> None:
        # Another node restarts.
        if self.failure is None:
            _end(ranks)
        else:
            until = time.monotonic() + self._wait()
            while not self.signals and (left := until - time.monotonic()) > 0:
                time.sleep(min(left, _POLL_S))
        self.begin_again()

    # Detection.

    def progress(self, rank: int) -> RankProgress | None:
        if rank not in self._pages:
            try:
                with self.files.page(rank).open("rb+") as file:
                    self._pages[rank] = Page(file.fileno())
            except (OSError, ValueError):
                # The page does not exist yet, or is still empty.
                return None
        return self._pages[rank].read()

    def _has_failed(self, rank: int, pid: int) -> bool:
        """Return whether the rank has failed. One that has written its error counts as failed before it exits: its exit may wait
        for ranks that wait for it."""
        return self.files.error(rank).exists() or (_is_dead(pid) and not self.files.exit(rank).exists())

    def _stalled(self, ranks: Mapping[int, int]) -> dict[int, float]:
        """Return the ranks that have stalled, with the seconds."""
        found = {}
        for rank, pid in ranks.items():
            progress = self.progress(rank)
            if progress is None or progress.phase == "done":
                continue
            seconds = time.monotonic() - progress.since
            known = progress.longest > 0
            limit = max(self.spec.stall_after, _STALL_FACTOR * progress.longest) if known else self.spec.start_after
            if seconds > self.spec.stall_after and (seconds > limit or (process_state(pid) or "?")[0] == "T"):
                found[rank] = seconds
        return found

    def _stall(self, stalled: Mapping[int, float], ranks: Mapping[int, int]) -> RankFailure:
        witnesses = collect_evidence(self.files, ranks)
        entered = {rank: found.entered for rank in ranks if (found := self.progress(rank)) is not None}
        rank, cause = find_culprit(witnesses, entered)
        cause = find_mismatch(witnesses) or cause
        seconds = stalled.get(rank, max(stalled.values()))
        return self._failure("stall", rank, f"no progress for {seconds:.0f}s; {cause}", witnesses, seconds)

    def _died(self, rank: int, ranks: Mapping[int, int]) -> RankFailure:
        living = {other: pid for other, pid in ranks.items() if not self._has_failed(other, pid)}
        return self._failure("rank-died", rank, "it died", collect_evidence(self.files, living) if living else [])

    def _failure(self, kind: str, rank: int, cause: str, witnesses: list[Witness], seconds: float = 0.0) -> RankFailure:
        where = self.progress(rank)
        step, phase = (0, "start") if where is None else (where.step, where.phase)
        mine = next((witness for witness in witnesses if witness.rank == rank), None)
        failure = RankFailure(kind, rank, cause, step, phase, seconds, witnesses=witnesses)
        if mine is not None:
            failure.stack, failure.collective = mine.stack, mine.collective
        if self.run.root.is_dir() and witnesses:
            directory = new_debug_directory(self.run.debug, f"{time.strftime('%Y%m%d-%H%M%S')}-attempt-{self.attempt}")
            failure.debug = str(directory.relative_to(self.run.root))
            save_evidence(directory, witnesses, self.files, {"kind": kind, "step": step, **failure.facts()})
        return failure

    def _explain(self, failure: RankFailure, exit_codes: Mapping[int, int]) -> None:
        """Find the cause from the exit codes, once torch has collected them. The rank that failed first by itself is named."""
        code = exit_codes.get(failure.rank, EXIT_BUG)
        errors = self.files.errors()
        if code < 0 and not self.files.error(failure.rank).exists():
            # Ended from outside, and errors of others follow from that; but NCCL aborts a rank that lost its peer.
            errors = [error for error in errors if code == -signal.SIGABRT and not _lost_a_peer(error[1])]
        if errors:
            # A rank that lost a connection failed after another one, even if file times are too coarse to show the order.
            failure.rank, failure.error = min(errors, key=lambda error: _lost_a_peer(error[1]))
            if (where := self.progress(failure.rank)) is not None:
                failure.step, failure.phase = where.step, where.phase
            failure.code = EXIT_BUG if failure.error.startswith("Traceback") else EXIT_REFUSED
            failure.cause = failure.error.splitlines()[-1]
            if _lost_a_peer(failure.error):
                failure.cause, failure.error = "it lost its connection to another rank", None
            return
        failure.code = 128 - code if code < 0 else code
        failure.cause = f"ended with exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL and _oom_kills() > self._oom_kills:
            failure.cause += ", for lack of memory: the kernel's count of such kills has grown"
        if -code == signal.SIGKILL and (memory := self._memory.get(failure.rank)):
            failure.cause += f"; it held {', '.join(f'{b / 2**30:.2f}' for b in memory)} GiB, second by second"
        crash = self.files.stacks(failure.rank)
        if not failure.stack and crash.exists():
            failure.stack = relevant_thread(crash.read_text(errors="replace"))
        if -code == signal.SIGABRT and (collective := _COLLECTIVE.search(failure.stack)):
            failure.cause += f" in {collective[1]}: what it got was not what it waited for, as when the ranks did not run the same code"

    def _blame_for_timeout(self, failure: RankFailure) -> None:
        """Name the rank that was waited for, if the one that died gave up in a collective."""
        rank = find_waited_for(failure.witnesses) if self._has_timed_out(failure) else None
        if rank is None:
            return
        stack = next(witness.stack for witness in failure.witnesses if witness.rank == rank)
        failure.cause = f"rank {failure.rank} waited for it in a collective until the time limit"
        failure.rank, failure.stack, failure.collective, failure.error = rank, stack, None, None

    def _has_timed_out(self, failure: RankFailure) -> bool:
        """Return whether a rank gave up in a collective. gloo raises an error; NCCL writes to the rank's log, and aborts."""
        if failure.error is not None or failure.code != 128 + signal.SIGABRT:
            return _TIMED_OUT.search(failure.error or "") is not None
        deadline = time.monotonic() + _LOG_S
        while not (found := any(map(_TIMED_OUT.search, last_words(self.run.root, failure.rank, _LAST_WORDS)))):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        return found

    # Decisions.

    def _may_restart(self, failure: RankFailure) -> bool:
        first = max((p.first for p in (self.progress(rank) for rank in self._pages) if p is not None), default=0)
        # There is a new checkpoint, so earlier failures no longer count.
        if first > self._first:
            self._first, self._restarts = first, 0
        self._restarts += 1
        self._at_step[failure.step] += 1
        times = self._at_step[failure.step]
        if times >= self.spec.same_step:
            failure.code = EXIT_BUG
            return self._give_up(f"step {failure.step} has ended it {times} times (fault.same_step)", failure)
        if self._restarts > self.spec.restarts:
            return self._give_up(
                f"{self._restarts - 1} restarts in a row brought no new checkpoint (fault.restarts)", failure
            )
        self._tell(failure)
        self._say(f"{failure}; restarting from the last good checkpoint in {self._wait():g}s")
        self._event("restart", failure.step, attempt=self.attempt + 1, wait_s=self._wait(), cause=str(failure))
        return True

    def _wait(self) -> float:
        return RetryPolicy(base_s=self.spec.backoff, cap_s=_LONGEST_WAIT_S).pause_s(max(1, self._restarts))

    def _give_up(self, reason: str, failure: RankFailure) -> bool:
        self._event("gave-up", failure.step, reason=reason, cause=str(failure), code=failure.code)
        self._tell(failure)
        return self._stop(f"{failure}\nnot restarted: {reason}")

    def _tell(self, failure: RankFailure) -> None:
        """Log the traceback or the stack, unless it was logged before."""
        shown = failure.error or failure.stack
        if shown and shown not in self._shown:
            self._shown.add(shown)
            self._say(f"rank {failure.rank}: {shown}")

    def _stopped(self, failure: RankFailure) -> bool:
        """Report a stop that failed. After two signals that is expected."""
        failure.code = self._stop_code()
        return self._stop(f"{signal.Signals(self.signals[-1]).name}: {failure}; the last checkpoint stands")

    def stopped_between(self) -> int:
        """Return the exit code of a stop that was requested while no rank was running."""
        # The code that raised KeyboardInterrupt has reported the reason.
        if not self.signals:
            return 128 + signal.SIGINT
        self._say(f"{signal.Signals(self.signals[-1]).name}: no rank was running")
        return self._stop_code()

    def _stop_code(self) -> int:
        """Return the exit code of a stop: resumable if a checkpoint was saved since the signal, or if one exists and there was
        one signal."""
        saved = [path.stat().st_mtime for path in self.run.checkpoints.glob("step-*")]
        resumable = saved and (len(self.signals) == 1 or max(saved) >= self._asked_at)
        return EXIT_RESUMABLE if resumable else 128 + self.signals[-1]

    def _stop(self, text: str) -> bool:
        self._say(text)
        return False

    def ended_elsewhere(self) -> int | None:
        """Return the exit code of the run if another node has ended it since this one started."""
        codes = {"done": 0, "interrupted": EXIT_RESUMABLE, "gave-up": EXIT_BUG}
        found = [e for e in read_jsonl(self.run.events) if e.get("time", 0) > self._started and e.get("event") in codes]
        return codes[found[-1]["event"]] if found else None

    def _say(self, text: str) -> None:
        _log.error("%s", text)

    def _event(self, kind: str, step: int, **facts: object) -> None:
        if self.run.root.is_dir():
            with JsonlWriter(self.run.events) as events:
                events.write({"event": kind, "step": step, "time": now(), **facts})

    def _watch_memory(self, ranks: Mapping[int, int]) -> None:
        if time.monotonic() - self._memory_at >= _MEMORY_EVERY_S:
            self._memory_at = time.monotonic()
            for rank, pid in ranks.items():
                state = process_state(pid)
                if state is not None and state[1]:
                    self._memory.setdefault(rank, deque(maxlen=5)).append(state[1])


def _lost_a_peer(error: str) -> bool:
    """Return whether an error's message, which follows the indented lines of its traceback, is about a lost peer."""
    return _LOST_PEER.search(error.rpartition("\n ")[2]) is not None


def _is_dead(pid: int) -> bool:
    state = process_state(pid)
    return state is None or state[0] in ("Z", "X")


def _end(ranks: Mapping[int, int]) -> None:
    """Kill the ranks at once. Their files are complete or absent, and a rank that waits for another would never end by itself."""
    for pid in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory, on this machine or in their container."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0

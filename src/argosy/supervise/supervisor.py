"""Watches the ranks of one node: notices one that died or stands still, saves what can be known, decides whether to start again.

A rank stands still when it stays in one phase for longer than `fault.stall_after`, or than four times the longest it took
before. The whole job is started again, from its last good checkpoint. It gives up after so many restarts in a row without a
new checkpoint, and where one step kills it again and again.
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
from argosy.record.rundir import RunDir
from argosy.supervise.evidence import Witness, claim, keep, mismatch, question, suspect, telling_thread
from argosy.supervise.rank_files import RankFiles

_log = logging.getLogger(__name__)
_PATIENCE = 4.0  # times the longest that a phase has taken
_LONGEST_WAIT_S = 60.0
_LOOK_S = 0.1
_MEMORY_EVERY_S = 1.0
_COLLECTIVE = re.compile(r"distributed_c10d\.py\", line \d+ in (\w+)")
# What gloo and NCCL say where the other end is gone. It is not the reason, which is told on the other node.
_LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited")


@dataclass
class Trouble:
    """Why the ranks of an attempt were ended."""

    kind: str  # rank-died or stall
    rank: int
    cause: str
    step: int
    phase: str
    seconds: float = 0.0  # it stood still
    stack: str = ""
    collective: str | None = None
    error: str | None = None
    debug: str | None = None
    code: int = EXIT_BUG

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
    """Of one node; its hooks are called by torch's agent."""

    scratch: Path
    run: RunDir
    spec: FaultSpec
    attempt: int = 0
    signals: list[int] = field(default_factory=list)  # that asked for a stop
    trouble: Trouble | None = None
    ended: bool = False  # the exit code is decided
    _restarts: int = 0  # since the last new checkpoint
    _at_step: Counter[int] = field(default_factory=Counter)
    _first: int = -1
    _pages: dict[int, Page] = field(default_factory=dict)
    _memory: dict[int, deque[int]] = field(default_factory=dict)
    _memory_at: float = 0.0
    _oom_kills: int = 0
    _shown: set[str] = field(default_factory=set)
    _started: float = field(default_factory=time.time)
    _asked_at: float = 0.0  # wall clock of the first signal

    def begin(self) -> None:
        """Before the ranks of an attempt are started."""
        self.files = RankFiles(self.scratch / f"attempt-{self.attempt}")
        self.files.announce(self.attempt)
        self.trouble, self._pages, self._memory, self._oom_kills = None, {}, {}, _oom_kills()

    def begin_again(self) -> None:
        self.attempt += 1
        self.begin()
        if self.signals:  # there was no rank left to be told
            raise KeyboardInterrupt

    @property
    def has_run(self) -> bool:
        """Whether ranks of this attempt have begun."""
        return bool(self._pages)

    def forward(self, number: int) -> None:
        """A signal that asks for a stop, to the ranks. They have all the time they need; a second ends them at once. When all of
        them have ended, there is nobody left to stop."""
        if self.ended:
            return
        self._asked_at = self._asked_at or time.time()
        self.signals.append(number)
        pids = self.files.pids()
        if not pids:
            raise KeyboardInterrupt  # none has begun: the agent ends them
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # What torch's agent calls.

    def look(self, ranks: dict[int, int]) -> None:
        if self.trouble is None:
            self._watch_memory(ranks)
            dead = [rank for rank, pid in ranks.items() if self._has_failed(rank, pid)]
            stalled = {} if dead else self._stalled(ranks)
            if dead:  # one that could not say why was ended by force, and others may have followed it
                self.trouble = self._died(min(dead, key=lambda rank: (self.files.error(rank).exists(), rank)), ranks)
            elif stalled:
                self.trouble = self._stall(stalled, ranks)
            if self.trouble is not None:
                _end(ranks)

    def failed(self, exit_codes: dict[int, int]) -> bool:
        if self.trouble is None:  # it died just after we looked
            self.trouble = self._died(min(exit_codes, key=lambda rank: (exit_codes[rank] >= 0, rank), default=0), {})
        trouble = self.trouble
        if trouble.kind == "rank-died":
            self._explain(trouble, exit_codes)
        if trouble.code == EXIT_REFUSED and trouble.error is not None:
            return self._stop(f"rank {trouble.rank}: {trouble.error}")
        self._event(trouble.kind, trouble.step, **trouble.facts())
        if self.signals:
            return self._stopped(trouble)
        return self._may_restart(trouble)

    def restarting(self, ranks: dict[int, int]) -> None:
        if self.trouble is None:  # it is another node that starts again
            _end(ranks)
        else:
            until = time.monotonic() + self._wait()
            while not self.signals and (left := until - time.monotonic()) > 0:
                time.sleep(min(left, _LOOK_S))
        self.begin_again()

    # What is wrong.

    def progress(self, rank: int) -> RankProgress | None:
        if rank not in self._pages:
            try:
                with self.files.page(rank).open("rb+") as file:
                    self._pages[rank] = Page(file.fileno())
            except (OSError, ValueError):  # not there yet, or still empty
                return None
        return self._pages[rank].read()

    def _has_failed(self, rank: int, pid: int) -> bool:
        """One that has said why it fails is not waited for: leaving, it may wait for others that wait for it."""
        return self.files.error(rank).exists() or (_is_dead(pid) and not self.files.exit(rank).exists())

    def _stalled(self, ranks: Mapping[int, int]) -> dict[int, float]:
        """Seconds that ranks have stood still, of those that have for too long."""
        found = {}
        for rank, pid in ranks.items():
            progress = self.progress(rank)
            if progress is None or progress.phase == "done":
                continue
            seconds = time.monotonic() - progress.since
            known = progress.longest > 0
            limit = max(self.spec.stall_after, _PATIENCE * progress.longest) if known else self.spec.start_after
            if seconds > self.spec.stall_after and (seconds > limit or (process_state(pid) or "?")[0] == "T"):
                found[rank] = seconds
        return found

    def _stall(self, stalled: Mapping[int, float], ranks: Mapping[int, int]) -> Trouble:
        witnesses = question(self.files, ranks)
        entered = {rank: found.entered for rank in ranks if (found := self.progress(rank)) is not None}
        rank, cause = suspect(witnesses, entered)
        cause = mismatch(witnesses) or cause
        seconds = stalled.get(rank, max(stalled.values()))
        return self._trouble("stall", rank, f"it has stood still for {seconds:.0f}s; {cause}", witnesses, seconds)

    def _died(self, rank: int, ranks: Mapping[int, int]) -> Trouble:
        living = {other: pid for other, pid in ranks.items() if not self._has_failed(other, pid)}
        return self._trouble("rank-died", rank, "it died", question(self.files, living) if living else [])

    def _trouble(self, kind: str, rank: int, cause: str, witnesses: list[Witness], seconds: float = 0.0) -> Trouble:
        where = self.progress(rank)
        step, phase = (0, "start") if where is None else (where.step, where.phase)
        mine = next((witness for witness in witnesses if witness.rank == rank), None)
        trouble = Trouble(kind, rank, cause, step, phase, seconds)
        if mine is not None:
            trouble.stack, trouble.collective = mine.stack, mine.collective
        if self.run.root.is_dir() and witnesses:
            directory = claim(self.run.debug, f"{time.strftime('%Y%m%d-%H%M%S')}-attempt-{self.attempt}")
            trouble.debug = str(directory.relative_to(self.run.root))
            keep(directory, witnesses, self.files, {"kind": kind, "step": step, **trouble.facts()})
        return trouble

    def _explain(self, trouble: Trouble, exit_codes: Mapping[int, int]) -> None:
        """What the exit says, once torch has collected it: the first that failed of its own accord comes first."""
        code = exit_codes.get(trouble.rank, EXIT_BUG)
        forced = code < 0 and not self.files.error(trouble.rank).exists()
        if not forced and (errors := self.files.errors()):
            # One that lost its connection followed another, even where the clock of files is too coarse to tell them apart.
            trouble.rank, trouble.error = min(errors, key=lambda error: _lost_a_peer(error[1]))
            if (where := self.progress(trouble.rank)) is not None:
                trouble.step, trouble.phase = where.step, where.phase
            trouble.code = EXIT_BUG if trouble.error.startswith("Traceback") else EXIT_REFUSED
            trouble.cause = trouble.error.splitlines()[-1]
            if _lost_a_peer(trouble.error):
                trouble.cause, trouble.error = "it lost its connection to another rank", None
            return
        trouble.code = 128 - code if code < 0 else code
        trouble.cause = f"ended with exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL and _oom_kills() > self._oom_kills:
            trouble.cause += ", for lack of memory: the kernel's count of such kills has grown"
        if -code == signal.SIGKILL and (memory := self._memory.get(trouble.rank)):
            trouble.cause += f"; it held {', '.join(f'{b / 2**30:.2f}' for b in memory)} GiB, second by second"
        crash = self.files.stacks(trouble.rank)
        if not trouble.stack and crash.exists():
            trouble.stack = telling_thread(crash.read_text(errors="replace"))
        if -code == signal.SIGABRT and (collective := _COLLECTIVE.search(trouble.stack)):
            trouble.cause += f" in {collective[1]}: what it got was not what it waited for, as when the ranks did not run the same code"

    # What is done about it.

    def _may_restart(self, trouble: Trouble) -> bool:
        first = max((p.first for p in (self.progress(rank) for rank in self._pages) if p is not None), default=0)
        if first > self._first:  # there is a new checkpoint: what went wrong before it is behind us
            self._first, self._restarts = first, 0
        self._restarts += 1
        self._at_step[trouble.step] += 1
        times = self._at_step[trouble.step]
        if times >= self.spec.same_step:
            trouble.code = EXIT_BUG
            return self._give_up(f"step {trouble.step} has ended it {times} times (fault.same_step)", trouble)
        if self._restarts > self.spec.restarts:
            return self._give_up(
                f"{self._restarts - 1} restarts in a row brought no new checkpoint (fault.restarts)", trouble
            )
        self._tell(trouble)
        self._say(f"{trouble}; starting again from the last good checkpoint in {self._wait():g}s")
        self._event("restart", trouble.step, attempt=self.attempt + 1, wait_s=self._wait(), cause=str(trouble))
        return True

    def _wait(self) -> float:
        return float(min(_LONGEST_WAIT_S, self.spec.backoff * 2.0 ** max(0, self._restarts - 1)))

    def _give_up(self, reason: str, trouble: Trouble) -> bool:
        self._event("gave-up", trouble.step, reason=reason, cause=str(trouble), code=trouble.code)
        self._tell(trouble)
        return self._stop(f"{trouble}\nnot started again: {reason}")

    def _tell(self, trouble: Trouble) -> None:
        """The traceback or the stack, unless the same was shown before."""
        shown = trouble.error or trouble.stack
        if shown and shown not in self._shown:
            self._shown.add(shown)
            self._say(f"rank {trouble.rank}: {shown}")

    def _stopped(self, trouble: Trouble) -> bool:
        """A stop was asked for, and did not come to its end: not by our fault if it was asked for twice."""
        trouble.code = self._stop_code()
        return self._stop(f"{signal.Signals(self.signals[-1]).name}: {trouble}; the last checkpoint stands")

    def stopped_between(self) -> int:
        """The exit code where a stop was asked for while no rank was there to be told."""
        if not self.signals:  # whoever raised it has said why
            return 128 + signal.SIGINT
        self._say(f"{signal.Signals(self.signals[-1]).name}: no rank was running")
        return self._stop_code()

    def _stop_code(self) -> int:
        """Resumable where one stop was asked for and there is a checkpoint, or where one was saved since, however often."""
        saved = [path.stat().st_mtime for path in self.run.checkpoints.glob("step-*")]
        resumable = saved and (len(self.signals) == 1 or max(saved) >= self._asked_at)
        return EXIT_RESUMABLE if resumable else 128 + self.signals[-1]

    def _stop(self, text: str) -> bool:
        self._say(text)
        return False

    def ended_elsewhere(self) -> int | None:
        """The exit code of the run, where another node has brought it to an end since we began."""
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
    return _LOST_PEER.search(error.splitlines()[-1]) is not None


def _is_dead(pid: int) -> bool:
    state = process_state(pid)
    return state is None or state[0] in ("Z", "X")


def _end(ranks: Mapping[int, int]) -> None:
    """At once: whatever they write is whole or absent, and one that waits for another would never end by itself."""
    for pid in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _oom_kills() -> int:
    """Processes the kernel has ended for lack of memory: of the machine, or of the container they were in."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0

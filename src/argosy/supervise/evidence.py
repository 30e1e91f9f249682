"""What is saved of ranks in trouble before anything is ended, and what it says: the stacks of each, its collectives, a verdict.

debug/<time>-attempt-<n>/
  rank-3.stacks         Python stacks of all threads, by a signal that a held GIL does not stop
  rank-3.flight.json    the collectives it began last (torch's flight recorder)
  verdict.json          who holds up the others, where, and why we think so
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from argosy.files import replace_file
from argosy.record.pulse import process_state
from argosy.supervise.rank_files import RankFiles
from argosy.supervise.rank_process import STACK_SIGNAL

_ANSWER_S, _OTHERS_S = 10.0, 3.0  # for the first answer, and from then on for those of the others
_SETTLED_S = 0.2  # that a file of stacks does not grow any more


@dataclass(frozen=True)
class Witness:
    """What one rank was doing."""

    rank: int
    state: str  # of its process, as /proc has it
    stacks: str
    collectives: list[dict[str, Any]] | None  # None: it did not answer

    @property
    def stack(self) -> str:
        """Of the thread that matters, the innermost call first."""
        return telling_thread(self.stacks)

    @property
    def collective(self) -> str | None:
        """The last it began."""
        return describe(self.collectives[-1]) if self.collectives else None


def telling_thread(stacks: str) -> str:
    """Of the stacks of all threads: the one that crashed, or else the oldest, which is the main one and comes last."""
    threads = [part for part in stacks.strip().split("\n\n") if part.startswith(("Thread ", "Current thread "))]
    crashed = [part for part in threads if part.startswith("Current") and "Fatal Python error" in stacks]
    return next(iter(crashed + threads[-1:]), "")


def describe(entry: Mapping[str, Any]) -> str:
    """`all_reduce [4096] float, number 57 of default_pg`"""
    name = str(entry.get("profiling_name", "?")).partition(":")[2] or str(entry.get("profiling_name", "?"))
    sizes = " ".join(str(size) for size in entry.get("input_sizes", []))
    kinds = " ".join(sorted({str(kind).lower() for kind in entry.get("input_dtypes", [])}))
    return f"{name} {sizes} {kinds}, number {_number(entry)} of {_group(entry)}".replace("  ", " ")


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", 0))


def _kind(entry: Mapping[str, Any]) -> object:
    """What is the same on all ranks: a sum's size is, what one rank scatters or gathers is not."""
    name = str(entry.get("profiling_name"))
    return (name, entry.get("input_sizes"), entry.get("input_dtypes")) if "all_reduce" in name else name


def _group_id(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    return str(group[0]) if isinstance(group, list) and group else "?"


def _group(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    return str(group[-1] or group[0]) if isinstance(group, list) and group else "?"


def question(files: RankFiles, ranks: Mapping[int, int]) -> list[Witness]:
    """Ask the ranks that still live for their stacks and collectives. One that is stopped is woken: it cannot answer
    otherwise, and will be ended next."""
    before = {rank: _size(files.stacks(rank)) for rank in ranks}
    states = {rank: (process_state(pid) or ("?", 0))[0] for rank, pid in ranks.items()}
    for rank, pid in ranks.items():
        with contextlib.suppress(OSError):  # it may end at any moment
            os.kill(pid, STACK_SIGNAL)
            if states[rank] == "T":
                os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + _ANSWER_S
    answered, asked = set[int](), set[int]()
    while len(answered) < len(ranks) and time.monotonic() < deadline:
        asked |= {rank for rank in ranks if rank not in asked and _ask(files.question(rank))}
        time.sleep(0.05)
        now = {r for r in ranks if _size(files.stacks(r)) > before[r] and files.flight(r).exists()}
        if now and not answered:
            deadline = min(deadline, time.monotonic() + _OTHERS_S)
        answered = now
    time.sleep(_SETTLED_S)
    return [
        Witness(rank, states[rank], _text(files.stacks(rank))[before[rank] :], _collectives(files.flight(rank)))
        for rank in sorted(ranks)
    ]


def _ask(question: Path) -> bool:
    """Whether somebody listens: a thread that was just woken may not yet."""
    try:
        os.close(os.open(question, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def mismatch(witnesses: list[Witness]) -> str | None:
    """Two ranks that are in different collectives under the same number of the same group: neither will ever end."""
    begun: dict[tuple[str, int], tuple[int, str, object]] = {}
    for witness in witnesses:
        for entry in witness.collectives or ():
            if entry.get("is_p2p"):
                continue
            what, kind = describe(entry), _kind(entry)
            rank, other, as_kind = begun.setdefault((_group_id(entry), _number(entry)), (witness.rank, what, kind))
            if as_kind != kind:
                return (
                    f"rank {rank} began {other}; rank {witness.rank} began {what}: the ranks did not run the same code"
                )
    return None


def suspect(witnesses: list[Witness], entered: Mapping[int, int]) -> tuple[int, str]:
    """The rank that holds up the others, and why we think so."""
    for witness in witnesses:
        if witness.state in ("T", "t"):
            return witness.rank, "its process is stopped (SIGSTOP, a debugger or a paused container)"
    for witness in witnesses:
        if witness.state == "D":
            return witness.rank, "its process waits for a device or a file system that does not answer"
    silent = [w.rank for w in witnesses if w.collectives is None]
    if 0 < len(silent) < len(witnesses):
        return silent[0], "it does not answer: something holds the interpreter's lock"
    begun = {w.rank: sum(1 for _ in w.collectives or ()) and _last(w) for w in witnesses}
    if begun and min(begun.values()) < max(begun.values()):
        rank = min(begun, key=lambda r: begun[r])
        ahead = max(begun, key=lambda r: begun[r])
        other = next(w for w in witnesses if w.rank == ahead)
        return rank, f"rank {ahead} waits in {other.collective}, which rank {rank} has not begun"
    rank = min(entered, key=lambda r: entered[r]) if entered else witnesses[0].rank
    return rank, "it has come least far" if len(witnesses) > 1 else "it is the only rank here"


def _last(witness: Witness) -> int:
    return max(int(entry.get("record_id", 0)) for entry in witness.collectives or ({},))


def claim(debug: Path, name: str) -> Path:
    """A new directory for one node's evidence: another that noticed in the same second has one of its own."""
    with contextlib.suppress(OSError):
        debug.mkdir(exist_ok=True)
    for number in itertools.count(1):
        directory = debug / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        except OSError:  # told by nobody: `keep` passes over it as well
            pass
        break
    return directory


def keep(directory: Path, witnesses: list[Witness], files: RankFiles, verdict: Mapping[str, object]) -> None:
    """Into the run directory. A disk that cannot take it does not stop a restart."""
    with contextlib.suppress(OSError):
        for witness in witnesses:
            replace_file(directory / f"rank-{witness.rank}.stacks", witness.stacks.encode())
            if files.flight(witness.rank).exists():
                shutil.copyfile(files.flight(witness.rank), directory / f"rank-{witness.rank}.flight.json")
        replace_file(directory / "verdict.json", orjson.dumps(dict(verdict), option=orjson.OPT_INDENT_2))


def _collectives(path: Path) -> list[dict[str, Any]] | None:
    try:
        return list(orjson.loads(path.read_bytes()).get("entries", []))
    except (OSError, ValueError):
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

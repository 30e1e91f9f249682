"""Evidence about failed ranks, saved before any process is killed: stacks, collectives and a verdict.

debug/<time>-attempt-<n>/
  rank-3.stacks         Python stacks of all threads, by a signal that a held GIL does not block
  rank-3.flight.json    the last collectives that the rank began (torch's flight recorder)
  verdict.json          the rank that blocks the others, where, and the reason
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
from argosy.supervise.rank_process import STACK_SIGNAL, RankFiles

# Seconds to wait for the first answer, and after it for the others.
_ANSWER_S, _OTHERS_S = 10.0, 3.0
# Seconds to let the stack files grow to their end.
_SETTLED_S = 0.2


@dataclass(frozen=True)
class Witness:
    """The state of one rank. `state` is its process state in /proc; `collectives` is None if the rank did not answer."""

    rank: int
    state: str
    stacks: str
    collectives: list[dict[str, Any]] | None

    @property
    def stack(self) -> str:
        """The stack of the relevant thread, innermost call first."""
        return relevant_thread(self.stacks)

    @property
    def collective(self) -> str | None:
        """The last collective that the rank began."""
        return describe(self.collectives[-1]) if self.collectives else None


def relevant_thread(stacks: str) -> str:
    """Return the thread that crashed, or else the main thread, which is the oldest and comes last."""
    threads = [part for part in stacks.strip().split("\n\n") if part.startswith(("Thread ", "Current thread "))]
    crashed = [part for part in threads if part.startswith("Current") and "Fatal Python error" in stacks]
    return next(iter(crashed + threads[-1:]), "")


def describe(entry: Mapping[str, Any]) -> str:
    """Describe a collective: `all_reduce [4096] float, number 57 of default_pg`."""
    name = str(entry.get("profiling_name", "?")).partition(":")[2] or str(entry.get("profiling_name", "?"))
    sizes = " ".join(str(size) for size in entry.get("input_sizes", []))
    kinds = " ".join(sorted({str(kind).lower() for kind in entry.get("input_dtypes", [])}))
    return f"{' '.join(filter(None, (name, sizes, kinds)))}, number {_number(entry)} of {_group(entry)}"


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", 0))


def _kind(entry: Mapping[str, Any]) -> object:
    """Return what must be equal on all ranks: the size of an all-reduce must, that of a scatter or gather need not."""
    name = str(entry.get("profiling_name"))
    return (name, entry.get("input_sizes"), entry.get("input_dtypes")) if "all_reduce" in name else name


def _group_id(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    return str(group[0]) if isinstance(group, list) and group else "?"


def _group(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    return str(group[-1] or group[0]) if isinstance(group, list) and group else "?"


def collect_evidence(files: RankFiles, ranks: Mapping[int, int]) -> list[Witness]:
    """Ask the living ranks for their stacks and collectives.

    A stopped process is continued: it cannot answer otherwise, and is killed next.
    """
    before = {rank: _size(files.stacks(rank)) for rank in ranks}
    states = {rank: (process_state(pid) or ("?", 0))[0] for rank, pid in ranks.items()}
    for rank, pid in ranks.items():
        # A process may end at any moment.
        with contextlib.suppress(OSError):
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
    """Wake the rank's listening thread. Returns False if it does not listen yet, as just after SIGCONT."""
    try:
        os.close(os.open(question, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def find_mismatch(witnesses: list[Witness]) -> str | None:
    """Find two ranks that are in different collectives under the same number of the same process group: a deadlock."""
    begun: dict[tuple[str, str, int], tuple[int, str, object]] = {}
    for witness in witnesses:
        for entry in witness.collectives or ():
            if entry.get("is_p2p"):
                continue
            what, kind = describe(entry), _kind(entry)
            place = (_backend(entry), _group_id(entry), _number(entry))
            rank, other, as_kind = begun.setdefault(place, (witness.rank, what, kind))
            if as_kind != kind:
                return (
                    f"rank {rank} began {other}; rank {witness.rank} began {what}: the ranks did not run the same code"
                )
    return None


def find_culprit(witnesses: list[Witness], entered: Mapping[int, int]) -> tuple[int, str]:
    """Return the rank that blocks the others, and the reason."""
    for witness in witnesses:
        if witness.state in ("T", "t"):
            return witness.rank, "its process is stopped (SIGSTOP, a debugger or a paused container)"
    for witness in witnesses:
        if witness.state == "D":
            return witness.rank, "its process waits for a device or a file system that does not answer"
    silent = [w.rank for w in witnesses if w.collectives is None]
    if 0 < len(silent) < len(witnesses):
        return silent[0], "it does not answer: something holds the interpreter's lock"
    behind = _furthest_behind(witnesses)
    if behind is not None:
        rank, ahead, entry = behind
        return rank, f"rank {ahead} waits in {describe(entry)}, which rank {rank} has not begun"
    rank = min(entered, key=lambda r: entered[r]) if entered else witnesses[0].rank
    return rank, "it has come least far" if len(witnesses) > 1 else "it is the only rank here"


def _furthest_behind(witnesses: list[Witness]) -> tuple[int, int, Mapping[str, Any]] | None:
    """Return a rank that others wait for: (the rank, one that waits, its collective); None if all have begun the same ones.

    Collectives are counted by process group: ranks of different groups begin different numbers of them. A rank that waits for
    another one in any group may be behind in the rest for that reason only.
    """
    begun: dict[object, dict[int, Mapping[str, Any]]] = {}
    for witness in witnesses:
        for entry in witness.collectives or ():
            if not entry.get("is_p2p"):
                last = begun.setdefault((_backend(entry), _group_id(entry)), {})
                last[witness.rank] = max(last.get(witness.rank, entry), entry, key=_number)
    waiting: set[int] = set()
    behind: list[tuple[int, int, Mapping[str, Any]]] = []
    for last in begun.values():
        most = max(map(_number, last.values()))
        ahead = [rank for rank, entry in last.items() if _number(entry) == most]
        late = [rank for rank, entry in last.items() if _number(entry) < most]
        waiting |= set(ahead) if late else set()
        behind += [(rank, ahead[0], last[ahead[0]]) for rank in late]
    return min(behind, key=lambda found: (found[0] in waiting, found[0]), default=None)


def find_waited_for(witnesses: list[Witness]) -> int | None:
    """Return the one living rank that waits in no collective: a rank whose collective timed out waited for it."""
    idle = [witness.rank for witness in witnesses if not _waits(witness)]
    return idle[0] if len(idle) == 1 else None


def _waits(witness: Witness) -> bool:
    """Return whether a rank is in a collective: on the host, or on its GPU."""
    on_gpu = (entry.get("state") != "completed" for entry in witness.collectives or () if _backend(entry) == "nccl")
    return "distributed_c10d.py" in witness.stack or any(on_gpu)


def _backend(entry: Mapping[str, Any]) -> str:
    return str(entry.get("profiling_name", "?")).partition(":")[0]


def new_debug_directory(debug: Path, name: str) -> Path:
    """Create a new directory for one node's evidence. Another node that failed in the same second gets its own."""
    with contextlib.suppress(OSError):
        debug.mkdir(exist_ok=True)
    for number in itertools.count(1):
        directory = debug / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        except OSError:
            # `save_evidence` ignores an unwritable disk as well.
            pass
        break
    return directory


def save_evidence(directory: Path, witnesses: list[Witness], files: RankFiles, verdict: Mapping[str, object]) -> None:
    """Write the evidence to the run directory. A disk error does not stop the restart."""
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

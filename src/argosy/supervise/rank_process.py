"""A rank started by an agent: it announces its process, answers requests for stacks and collectives, and reports its end.

It dies with its agent, however that ends: an unwatched rank would hold the run's lock and its GPU.

`RankFiles` is the directory that an agent shares with its ranks, one for each attempt: it holds what exit codes cannot carry.

A rank writes its process id, its heartbeat page, and the reason of a failure or the code of an orderly exit. On request it
writes its Python stacks and its collectives. Stacks are requested by a signal, whose handler runs whatever the interpreter is
doing; collectives by a named pipe, which a thread of the rank reads.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from argosy.errors import EXIT_BUG, EXIT_DONE, EXIT_REFUSED, ArgosyError
from argosy.record.heartbeat import Heartbeat
from argosy.record.rank_output import RankOutput
from argosy.record.rundir import RunDir
from argosy.supervise.world import World

STACK_SIGNAL = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1


def run_as_rank(function: Callable[[], int], rank: int) -> int:
    """Run this rank's part. If an agent started the rank, the result is written for the agent to report."""
    files = RankFiles.of(os.environ)
    if files is None:
        return function()
    _die_with_agent()
    with _answering(files, rank):
        write_atomically(files.pid(rank), str(os.getpid()))
        try:
            code = function()
        except ArgosyError as error:
            write_atomically(files.error(rank), str(error))
            return EXIT_REFUSED
        except Exception:  # noqa: BLE001 - the agent reports it, once for all ranks
            write_atomically(files.error(rank), traceback.format_exc())
            return EXIT_BUG
    write_atomically(files.exit(rank), str(code))
    return EXIT_DONE


def keep_output(run: RunDir, world: World) -> RankOutput:
    """Copy this rank's output to its log from here on.

    The log also gets the error or crash stacks that the rank writes for its agent. Without an agent, a crash prints its own
    stacks.
    """
    files = RankFiles.of(os.environ)
    if files is None:
        faulthandler.enable()
    left = () if files is None else (files.error(world.rank), files.stacks(world.rank))
    return RankOutput(run.root, world.rank, world.size, left)


def open_heartbeat(rank: int) -> Heartbeat:
    """Open the heartbeat of this rank. If there is an agent, it reads the heartbeat too."""
    files = RankFiles.of(os.environ)
    return Heartbeat(rank, attempt=attempt(os.environ), page=None if files is None else files.page(rank))


def _die_with_agent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The agent died before prctl took effect.
        if os.getppid() != agent(os.environ):
            os._exit(128 + signal.SIGKILL)


@contextmanager
def _answering(files: RankFiles, rank: int) -> Iterator[None]:
    """Dump stacks on the signal and on a crash of the interpreter, and write the flight record on request."""
    os.mkfifo(files.question(rank))
    with files.stacks(rank).open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
        threading.Thread(target=_answer, args=(files, rank), name="argosy-answers", daemon=True).start()
        try:
            yield
        finally:
            faulthandler.unregister(STACK_SIGNAL)
            faulthandler.disable()


def _answer(files: RankFiles, rank: int) -> None:
    while True:
        # Blocks until the supervisor asks.
        with files.question(rank).open("rb") as question:
            question.read()
        torch_is_here = "argosy.compat" in sys.modules
        if torch_is_here:
            from argosy.compat import flight_record

            write_atomically(files.flight(rank), flight_record())


# Environment variables of a rank.
_DIRECTORY, _ATTEMPT, _AGENT = "ARGOSY_RANKS", "ARGOSY_ATTEMPT", "ARGOSY_AGENT"


class RankFiles:
    """Paths of the files of each rank."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> RankFiles | None:
        """Return the files of the agent that started this process, or None."""
        directory = environ.get(_DIRECTORY)
        return None if directory is None else cls(Path(directory))

    def announce(self, attempt: int) -> None:
        """Create the directory and pass it to the ranks started from now on, by environment variables."""
        self.root.mkdir(parents=True)
        os.environ |= {_DIRECTORY: str(self.root), _ATTEMPT: str(attempt), _AGENT: str(os.getpid())}

    @staticmethod
    def forget() -> None:
        for name in (_DIRECTORY, _ATTEMPT, _AGENT):
            os.environ.pop(name, None)

    def pids(self) -> dict[int, int]:
        return {int(file.stem): int(file.read_text()) for file in self.root.glob("*.pid")}

    def pid(self, rank: int) -> Path:
        return self.root / f"{rank}.pid"

    def page(self, rank: int) -> Path:
        return self.root / f"{rank}.page"

    def stacks(self, rank: int) -> Path:
        return self.root / f"{rank}.stacks"

    def question(self, rank: int) -> Path:
        return self.root / f"{rank}.question"

    def flight(self, rank: int) -> Path:
        return self.root / f"{rank}.flight.json"

    def error(self, rank: int) -> Path:
        return self.root / f"{rank}.error"

    def exit(self, rank: int) -> Path:
        return self.root / f"{rank}.exit"

    def exit_codes(self) -> list[int]:
        return [int(file.read_text()) for file in self.root.glob("*.exit")]

    def errors(self) -> list[tuple[int, str]]:
        """Return (rank, reason) of failed ranks, in the order of failure as far as file times tell."""
        files = sorted(self.root.glob("*.error"), key=lambda file: (file.stat().st_mtime_ns, int(file.stem)))
        return [(int(file.stem), file.read_text().rstrip()) for file in files]


def attempt(environ: Mapping[str, str]) -> int:
    """Return how often the agent, ours or torchrun, has restarted its ranks."""
    return int(environ.get(_ATTEMPT) or environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def agent(environ: Mapping[str, str]) -> int:
    """Return the process id of the agent that started this process."""
    return int(environ[_AGENT])


def write_atomically(path: Path, text: str) -> None:
    partial = path.with_suffix(f"{path.suffix}-partial")
    partial.write_text(text)
    partial.rename(path)

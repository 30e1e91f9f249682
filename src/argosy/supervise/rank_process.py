"""One rank among those an agent started: it says who it is, answers questions about where it stands, and how it ended.

It dies with its agent, whatever ends that: a rank nobody watches would hold the run's lock and its GPU.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from argosy.errors import EXIT_BUG, EXIT_DONE, EXIT_REFUSED, ArgosyError
from argosy.record.heartbeat import Heartbeat
from argosy.record.rank_output import RankOutput
from argosy.record.rundir import RunDir
from argosy.supervise.rank_files import RankFiles, agent, attempt, leave
from argosy.supervise.world import World

STACK_SIGNAL = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1


def run_as_rank(function: Callable[[], int], rank: int) -> int:
    """Run this process's part. Where an agent started it, its end is left for that to tell."""
    files = RankFiles.of(os.environ)
    if files is None:
        return function()
    _die_with_agent()
    with _answering(files, rank):
        leave(files.pid(rank), str(os.getpid()))
        try:
            code = function()
        except ArgosyError as error:
            leave(files.error(rank), str(error))
            return EXIT_REFUSED
        except Exception:  # noqa: BLE001 - told by the agent, once for all ranks
            leave(files.error(rank), traceback.format_exc())
            return EXIT_BUG
    leave(files.exit(rank), str(code))
    return EXIT_DONE


def keep_output(run: RunDir, world: World) -> RankOutput:
    """From here on, whatever this rank says is also in its log: how it fails or crashes too, which it leaves to its agent or,
    without one, tells itself."""
    files = RankFiles.of(os.environ)
    if files is None:
        faulthandler.enable()
    left = () if files is None else (files.error(world.rank), files.stacks(world.rank))
    return RankOutput(run.root, world.rank, world.size, left)


def open_heartbeat(rank: int) -> Heartbeat:
    """This rank's, which its agent reads as well where it has one."""
    files = RankFiles.of(os.environ)
    return Heartbeat(rank, attempt=attempt(os.environ), page=None if files is None else files.page(rank))


def _die_with_agent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent(os.environ):  # it was gone before the kernel knew
            os._exit(128 + signal.SIGKILL)


@contextmanager
def _answering(files: RankFiles, rank: int) -> Iterator[None]:
    """Leave stacks at a signal, and also when the interpreter crashes; leave the record of collectives at a question."""
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
        with files.question(rank).open("rb") as question:  # waits for somebody to ask
            question.read()
        torch_is_here = "argosy.compat" in sys.modules
        if torch_is_here:
            from argosy.compat import flight_record

            leave(files.flight(rank), flight_record())

"""Real ranks that stay alive between cases: starting a process that has imported torch costs more than most cases do.

A case is the name of a function and its arguments; it runs on the first n ranks of the pool, which join a new process group
for it and leave it afterwards. The function returns what should be sent back. A case that hangs or kills a rank costs the
pool, and the next case gets a new one; where the ranks waited is told with the failure.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from argosy.compat import FLIGHT_RECORD, flight_record
from argosy.compat.absent_peers import forget_meshes
from argosy.parallel.cuda_graphs import release_graphs
from dist.devices import BACKEND, claim

CASE_S, JOIN_S = 300.0, 180.0  # a first case waits for its ranks to import torch
LATE_S = 150.0  # a rank that takes longer notes its stacks and collectives, before NCCL ends it for that
# torch 2.11 keeps the meshes of sharded parameters, and their groups, for good.
KEEPS_MESHES = torch.__version__.startswith("2.11.")


class RankFailed(AssertionError):
    """With the traceback of the first rank that failed."""


class Pool:
    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._stacks = tempfile.TemporaryDirectory()

    def run(self, n: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(*arguments)`, a function of an importable module, returns on each of n ranks."""
        with tempfile.TemporaryDirectory() as directory:
            name = f"{function.__module__}:{function.__qualname__}"
            try:
                self._grow(n)
                for rank, pipe in enumerate(self._pipes[:n]):
                    pipe.send((name, arguments, rank, n, str(Path(directory) / "store")))
                end = time.monotonic() + CASE_S
                answers = [self._answer(rank, end) for rank in range(n)]
            except BaseException:  # a time limit of the test's, or a rank that is gone
                self.close()
                raise
        failures = [(rank, text) for rank, (fine, text) in enumerate(answers) if not fine]
        if failures:
            self.close()  # the others may be waiting for the one that failed
            first = min(failures, key=lambda failure: _from_others(failure[1]))
            raise RankFailed(f"rank {first[0]} of {n}:\n{first[1]}{self._waited(n)}")
        return [value for _, value in answers]

    def _answer(self, rank: int, end: float) -> tuple[bool, Any]:
        pipe = self._pipes[rank]
        try:
            came = pipe.poll(max(0, end - time.monotonic()))
            return pipe.recv() if came else (False, f"no answer within {CASE_S:.0f} s")
        except EOFError:
            return False, "the process ended"

    def _waited(self, n: int) -> str:
        """Where ranks that were late were at that moment."""
        files = [(rank, Path(self._stacks.name) / str(rank)) for rank in range(n)]
        noted = [(rank, file.read_text()) for rank, file in files if file.exists()]
        return "".join(f"\nrank {rank} after {LATE_S:.0f} s:\n{stacks}" for rank, stacks in noted if stacks)

    def _grow(self, ranks: int) -> None:
        """A process is started when a case first needs it: forked from one that has imported torch and computed nothing."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([
            "argosy.train.run", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "numpy.random"
        ])  # fmt: skip
        while len(self._processes) < ranks:
            ours, theirs = context.Pipe()
            place = len(self._processes)
            process = context.Process(target=_serve, args=(theirs, place, f"{self._stacks.name}/{place}"), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join(5)
        self._processes, self._pipes = [], []


def _serve(pipe: Connection, place: int, stacks: str) -> None:
    os.environ.update(FLIGHT_RECORD)
    torch.set_num_threads(1)
    claim(place)
    caches = _caches()
    freeze = gc.freeze
    freeze()  # as in conftest.py
    gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]
    while True:
        try:
            name, arguments, rank, n, store = pipe.recv()
        except (EOFError, OSError):
            return
        module, _, function = name.partition(":")
        late = open(stacks, "w")  # noqa: SIM115 - until the case is over
        faulthandler.dump_traceback_later(LATE_S, file=late)
        record = threading.Timer(LATE_S + 1, _note_collectives, [late])
        record.daemon = True
        record.start()
        try:
            if n > 1:
                found = dist.FileStore(store, n)
                dist.init_process_group(
                    BACKEND, store=found, rank=rank, world_size=n, timeout=timedelta(seconds=JOIN_S)
                )
            value = getattr(importlib.import_module(module), function)(*arguments)
            if n > 1:
                dist.barrier()
                release_graphs()
                dist.destroy_process_group()
            pipe.send((True, value))
        except BaseException:  # noqa: BLE001 - sent to the test
            pipe.send((False, traceback.format_exc()))
        finally:
            release_graphs(failed=True)
            if dist.is_initialized():
                dist.destroy_process_group()
            caches += _caches()
            _forget_meshes(caches)
            faulthandler.cancel_dump_traceback_later()
            record.cancel()
            record.join()
            late.close()
            freeze()  # what the case imported: the compiler alone is half a million objects, which each case after it would walk


def _from_others(failure: str) -> int:
    """How likely another rank's failure caused this one: what a rank raised itself comes first."""
    signs = ("the process ended", "by peer", "no answer within")
    return max((place for place, sign in enumerate(signs, 1) if sign in failure), default=0)


def _note_collectives(file: TextIO) -> None:
    """Write the last collectives of this rank, of which some may wait for others."""
    with contextlib.suppress(ValueError):  # closed: the case ended
        keys = ("process_group", "collective_seq_id", "profiling_name", "state")
        for entry in json.loads(flight_record())["entries"][-12:]:
            file.write(" ".join(str(entry.get(key)) for key in keys) + "\n")
        file.flush()


def gloo_threads() -> int:
    """How many threads of gloo's this process has: one for each group."""
    found = 0
    for comm in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found += "gloo" in comm.read_text()
    return found


def _caches() -> list[Any]:
    """The caches of DTensor's functions that the garbage collector sees."""
    found: list[Any] = [thing for thing in gc.get_objects() if type(thing) is functools._lru_cache_wrapper]
    return [cache for cache in found if (cache.__module__ or "").startswith("torch.distributed")]


def _forget_meshes(caches: list[Any]) -> None:
    """DTensor remembers layouts by the shape of their mesh: it would find the groups of an earlier case in them, and keeps them alive.

    Each group of gloo's has a thread that wakes hundreds of times a second.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute

        forget_meshes()
        getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    for cache in caches:
        cache.cache_clear()
    gc.collect()

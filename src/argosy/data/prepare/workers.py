"""A pool of processes that share nothing: each is sent the name of a part and answers with its books.

Nothing but names and small facts crosses between processes. What a worker raises is raised here: a refusal as the refusal it
is, anything else as a `WorkerFault` with the worker's traceback. A worker that dies is noticed at once, because its pipe
closes, and ends the job with the part it was making; it never leaves the others waiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing  # noqa: TID251 - pipes to children of this process, which run our code and nobody else can open
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait  # noqa: TID251 - as above
from pathlib import Path
from typing import Any

from argosy.data.prepare.parts import PartFacts, PartMaker, PartName, PartOptions
from argosy.data.prepare.preview import sample_texts
from argosy.data.text.engines import Encode, EngineFault, Proof, load_engine
from argosy.data.text.inputs import InputFile
from argosy.data.text.tokenizer import ByteTokenizer, JsonTokenizer, SentencePieceTokenizer, Tokenizer
from argosy.errors import ArgosyError

_AGAIN = "run the same command again, with fewer --workers if memory is short: finished parts are kept"
_FAREWELL_S = 5.0  # for a worker that closed its pipe to end
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@dataclass(frozen=True)
class Recipe:
    """What another process needs to encode as this one would, and no more: loading a tokenizer takes time."""

    file: str
    content: bytes
    engine: str | None
    special_in_text: bool
    vocab_size: int
    eod_id: int | None

    def encoder(self) -> Encode:
        if self.engine is not None:
            return load_engine(self.engine, self.content.decode(), self.special_in_text)
        if self.content == ByteTokenizer().stored()[1]:
            return ByteTokenizer().encode
        if self.file.endswith(".model"):
            return SentencePieceTokenizer(self.content, self.file).encode
        return JsonTokenizer(self.content.decode(), self.file, special_in_text=self.special_in_text).encode


def recipe_of(tokenizer: Tokenizer, engine: str | None, *, eod: int | None) -> Recipe:
    special = isinstance(tokenizer, JsonTokenizer) and tokenizer.special_in_text
    return Recipe(*tokenizer.stored(), engine, special, tokenizer.vocab_size, eod)


class WorkerFault(RuntimeError):
    """An exception of a worker that is no refusal: a bug. Its text holds the worker's traceback."""


Task = tuple[PartName, list[InputFile]]


class Pool:
    """`for name, facts in pool.run(tasks): …`, then `close()`."""

    def __init__(
        self,
        count: int,
        directory: Path,
        recipe: Recipe,
        options: PartOptions,
        *,
        sampled: list[list[InputFile]],
    ) -> None:
        """`sampled`: the groups to prove an engine on."""
        # Neither forked (engines have threads) nor a daemon's children: plain new interpreters.
        context = multiprocessing.get_context("spawn")
        self._busy: dict[Connection, PartName] = {}
        self._idle: list[Connection] = []
        self._processes: dict[Connection, Any] = {}
        self.engine = recipe.engine
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(theirs, directory, recipe, options, None if number else sampled),
                name=f"prepare-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes[ours] = process
            self._idle.append(ours)

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join()

    def prove(self, reference: Tokenizer) -> None:
        """Have every worker prove its engine, before anything else; raises EngineFault where one cannot."""
        try:
            proof = Proof.by(reference, _answer(self._idle[0]))  # while they load
            for connection in self._idle:
                connection.send(proof)
            release_memory()  # of loading and encoding; from here on little is needed
            faults = [fault for connection in self._idle if (fault := _answer(connection)) is not None]
        except (EOFError, OSError):
            faults = ["ended its process"]
        if faults:
            raise EngineFault(faults[0])

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[PartName, PartFacts]]:
        """Parts as they are finished. `tasks` is asked for the next one only when a worker is free."""
        while True:
            while self._idle and (task := next(tasks, None)) is not None:
                connection = self._idle.pop(0)
                self._busy[connection] = task[0]
                # A worker that is gone shows when its answer is asked for.
                with contextlib.suppress(OSError):
                    connection.send(task)
            if not self._busy:
                return
            for ready in wait(list(self._busy)):
                yield self._receive(ready)

    def _receive(self, connection: Any) -> tuple[PartName, PartFacts]:
        name = self._busy.pop(connection)
        try:
            answer = _answer(connection)
        except (EOFError, OSError):
            raise self._died(connection, name) from None
        self._idle.append(connection)
        return name, answer

    def _died(self, connection: Connection, name: PartName) -> ArgosyError:
        process = self._processes[connection]
        process.join(_FAREWELL_S)
        return ArgosyError(
            "data.worker-died",
            f"a worker died while making part {name}: {process.name} {_end_of(process.exitcode)}",
            fix=_AGAIN,
        )


def _end_of(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "closed its connection"
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; for lack of memory, perhaps: the kernel's log tells)"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _answer(connection: Any) -> Any:
    """What a worker sends, or raises what it ran into."""
    answer = connection.recv()
    if isinstance(answer, Raised):
        raise answer.exception()
    return answer


@dataclass(frozen=True)
class Raised:
    """An exception, as it crosses to the process that shows it: exceptions of libraries cannot all be pickled."""

    kind: str
    traceback: str
    refusal: dict[str, Any] | None

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        refusal = error.as_dict() if isinstance(error, ArgosyError) else None
        return cls(type(error).__name__, "".join(traceback.format_exception(error)), refusal)

    def exception(self) -> Exception:
        if self.refusal is not None:
            return ArgosyError(**self.refusal)
        if self.kind == "MemoryError":
            return ArgosyError("data.worker-died", "a worker was given no more memory (MemoryError)", fix=_AGAIN)
        return WorkerFault(f"a worker of `argosy data prepare` failed with {self.kind}\n\n{self.traceback}")


def _send_result(connection: Connection, make: Callable[..., Any], *arguments: Any) -> None:
    try:
        answer = make(*arguments)
    except BaseException as error:  # noqa: BLE001 - the parent shows it; a panic in Rust is no Exception
        answer = Raised.of(error)
    connection.send(answer)


def _work(
    connection: Connection,
    directory: Path,
    recipe: Recipe,
    options: PartOptions,
    sampled: list[list[InputFile]] | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _keep_little_memory()
    if recipe.engine is not None and sampled is not None:
        _send_result(connection, sample_texts, sampled, options)
    proven = None if recipe.engine is None else _proven(recipe, connection)
    if recipe.engine is not None and proven is None:
        return
    maker: PartMaker | None = None

    def make(name: PartName, group: list[InputFile]) -> PartFacts:
        nonlocal maker
        if maker is None:
            maker = PartMaker(directory, proven or recipe.encoder(), recipe.vocab_size, recipe.eod_id, options)
        return maker.make(name, group)

    while True:
        try:
            task = connection.recv()
        except EOFError:  # the parent is gone
            return
        _send_result(connection, make, *task)
        release_memory()


def release_memory() -> None:
    """Give back what is free between blocks still in use, where the C library can be asked to."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _keep_little_memory() -> None:
    """Have large blocks that are freed go back to the system: left alone, the C library raises the size from which they
    do to the largest it has seen, and pyarrow has an allocator of its own that keeps more."""
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    with contextlib.suppress(OSError, AttributeError):  # not every C library has it
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(parameter, 8 << 20)


def _proven(recipe: Recipe, connection: Connection) -> Encode | None:
    """The engine, if it passes the proof that the parent made meanwhile; the parent is told."""
    try:
        try:
            encode = recipe.encoder()
        finally:
            proof = connection.recv()
        proof.check(encode)
    except EngineFault as fault:
        connection.send(str(fault))
        return None
    except BaseException as error:  # noqa: BLE001 - the parent shows it; a panic in Rust is no Exception
        connection.send(Raised.of(error))
        return None
    connection.send(None)
    return encode

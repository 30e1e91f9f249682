"""A process pool: each worker receives the name of a part and answers with its facts.

Only names and small facts cross between processes. An exception of a worker is raised in the parent: an ArgosyError as it is,
anything else as a `WorkerFault` with the worker's traceback. The death of a worker is detected at once, because its pipe
closes. It ends the job with an error that names the part; no other worker is left waiting.
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
from typing import Any, Protocol

from argosy.data.prepare.documents import Encoder
from argosy.data.prepare.preview import sample_texts
from argosy.data.text.engines import Encode, EngineFault, Proof, load_engine
from argosy.data.text.inputs import InputFile
from argosy.data.text.tokenizer import ByteTokenizer, JsonTokenizer, SentencePieceTokenizer, Tokenizer
from argosy.errors import ArgosyError
from argosy.log_handler import has_log_handler, install_log_handler

_AGAIN = "run the same command again, with fewer --workers if memory is short: finished parts are kept"
# How long to wait for a worker that closed its pipe to exit.
_JOIN_TIMEOUT_S = 5.0
# Parameters of mallopt in malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class EncoderSpec:
    """A small description from which a worker builds its encoder. The parent need not load the engine, which takes time."""

    file: str
    content: bytes
    engine: str | None
    special_in_text: bool
    vocab_size: int
    eod_id: int | None

    def encoder(self) -> Encode:
        """Load the engine or tokenizer, and return its encode function."""
        if self.engine is not None:
            return load_engine(self.engine, self.content.decode(), self.special_in_text)
        return self.tokenizer().encode_batch

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer, run by its own library."""
        if self.content == ByteTokenizer().stored()[1]:
            return ByteTokenizer()
        if self.file.endswith(".model"):
            return SentencePieceTokenizer(self.content, self.file)
        return JsonTokenizer(self.content.decode(), self.file, special_in_text=self.special_in_text)


def encoder_spec(tokenizer: Tokenizer, engine: str | None, *, eod: int | None) -> EncoderSpec:
    """Describe a tokenizer that `engine` runs; None is the tokenizer's own library."""
    special = isinstance(tokenizer, JsonTokenizer) and tokenizer.special_in_text
    return EncoderSpec(*tokenizer.stored(), engine, special, tokenizer.vocab_size, eod)


class WorkerFault(RuntimeError):
    """An unexpected exception of a worker: a bug. Its text contains the worker's traceback."""


# The name of a part, or other work, and its inputs.
Task = tuple[Any, Any]


class Maker(Protocol):
    """What a worker does: it makes the part of this name from its inputs and returns the facts about it."""

    def make(self, name: Any, group: Any, /) -> Any: ...


class PartRecipe(Protocol):
    """The options of parts, from which a worker builds its maker. They are sent to other processes."""

    @property
    def keys(self) -> tuple[str, ...]: ...

    @property
    def text_lines(self) -> bool: ...

    @property
    def places_tokens(self) -> bool:
        """True if the tokenizer itself must run, because it knows which characters each token came from."""

    def maker(self, directory: Path, encoder: Encoder | None) -> Maker:
        """Return a maker of such parts. `encoder` is None if they hold no tokens."""


class Workers(Protocol):
    """Processes that make parts: a pool on this machine, or a Ray cluster."""

    engine: str | None

    def prove(self, reference: Tokenizer) -> None:
        """Have every worker check its engine against the reference. Raise EngineFault if one fails."""

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[Any, Any]]:
        """Yield names and facts as they are finished."""

    def close(self) -> None:
        """Stop the workers."""


class Pool:
    """The process pool. Use `for name, facts in pool.run(tasks): …`, then `close()`."""

    def __init__(
        self,
        count: int,
        directory: Path,
        spec: EncoderSpec | None,
        options: PartRecipe,
        *,
        sampled: list[list[InputFile]],
    ) -> None:
        """Start `count` workers. `sampled` are the input groups from which the sample for the engine check is taken."""
        # Spawn new interpreters: a fork is unsafe, because engines have threads.
        context = multiprocessing.get_context("spawn")
        self._busy: dict[Connection, Any] = {}
        self._idle: list[Connection] = []
        self._processes: dict[Connection, Any] = {}
        self.engine: str | None = None if spec is None else spec.engine
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(theirs, directory, options, None if number else sampled, has_log_handler()),
                name=f"prepare-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes[ours] = process
            self._idle.append(ours)
        # A tokenizer is larger than the buffer of a pipe, so this waits until the worker reads. All of them start meanwhile.
        for connection in self._idle:
            # A dead worker is detected when its answer is received.
            with contextlib.suppress(OSError):
                connection.send(spec)

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join()

    def prove(self, reference: Tokenizer) -> None:
        """Have every worker check its engine against the reference. Call it before `run`. Raise EngineFault if one fails."""
        try:
            # The reference encodes while the workers load their engines.
            proof = Proof.by(reference, _answer(self._idle[0]))
            for connection in self._idle:
                connection.send(proof)
            # Encoding with the reference needed memory; the parent needs little from here on.
            release_memory()
            faults = [fault for connection in self._idle if (fault := _answer(connection)) is not None]
        except (EOFError, OSError):
            faults = ["ended its process"]
        if faults:
            raise EngineFault(faults[0])

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[Any, Any]]:
        """Yield parts as they are finished. The next task is requested only when a worker is free."""
        while True:
            while self._idle and (task := next(tasks, None)) is not None:
                connection = self._idle.pop(0)
                self._busy[connection] = task[0]
                with contextlib.suppress(OSError):
                    connection.send(task)
            if not self._busy:
                return
            for ready in wait(list(self._busy)):
                yield self._receive(ready)

    def _receive(self, connection: Any) -> tuple[Any, Any]:
        name = self._busy.pop(connection)
        try:
            answer = _answer(connection)
        except (EOFError, OSError):
            raise self._died(connection, name) from None
        self._idle.append(connection)
        return name, answer

    def _died(self, connection: Connection, name: Any) -> ArgosyError:
        process = self._processes[connection]
        process.join(_JOIN_TIMEOUT_S)
        return ArgosyError(
            "data.worker-died",
            f"a worker died while making part {name}: {process.name} {_end_of(process.exitcode)}",
            fix=_AGAIN,
        )


def _end_of(code: int | None) -> str:
    """Describe how a process ended."""
    if code is None:
        return "closed its connection"
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; perhaps out of memory: see the kernel log)"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _answer(connection: Any) -> Any:
    """Receive a worker's answer. Raise its exception if it failed."""
    answer = connection.recv()
    if isinstance(answer, Raised):
        raise answer.exception()
    return answer


@dataclass(frozen=True)
class Raised:
    """An exception as it is sent to the parent. Exceptions of libraries cannot all be pickled."""

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
            return ArgosyError("data.worker-died", "a worker ran out of memory (MemoryError)", fix=_AGAIN)
        return WorkerFault(f"a worker of `argosy data prepare` failed with {self.kind}\n\n{self.traceback}")


def _send_result(connection: Connection, make: Callable[..., Any], *arguments: Any) -> None:
    try:
        answer = make(*arguments)
    except BaseException as error:  # noqa: BLE001 - the parent shows it; a Rust panic is not an Exception
        answer = Raised.of(error)
    connection.send(answer)


def _work(
    connection: Connection,
    directory: Path,
    options: PartRecipe,
    sampled: list[list[InputFile]] | None,
    shows_log: bool,
) -> None:
    if shows_log:
        install_log_handler()
    # The parent handles Ctrl-C and terminates the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _return_freed_memory()
    try:
        spec: EncoderSpec | None = connection.recv()
    except EOFError:
        # The parent is gone.
        return
    proven: Encode | None = None
    if spec is not None and spec.engine is not None:
        if sampled is not None:
            _send_result(connection, sample_texts, sampled, options)
        proven = _proven(spec, connection)
        if proven is None:
            return
    maker: Maker | None = None

    def make(name: Any, group: Any) -> Any:
        nonlocal maker
        maker = maker or make_maker(directory, spec, options, proven)
        return maker.make(name, group)

    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        _send_result(connection, make, *task)
        release_memory()


def make_maker(
    directory: Path,
    spec: EncoderSpec | None,
    options: PartRecipe,
    encode: Encode | None = None,
    tokenizer: Tokenizer | None = None,
) -> Maker:
    """Return the maker of a worker. `encode` is an engine, and `tokenizer` a tokenizer, that is already loaded."""
    if spec is None:
        return options.maker(directory, None)
    if encode is None:
        tokenizer = tokenizer or spec.tokenizer()
        encode = tokenizer.encode_batch
    return options.maker(directory, Encoder(encode, tokenizer, spec.vocab_size, spec.eod_id))


def release_memory() -> None:
    """Return free heap memory to the system with malloc_trim, if the C library has it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _return_freed_memory() -> None:
    """Make large freed blocks go back to the system at once.

    By default glibc raises its mmap threshold to the largest block freed so far, and pyarrow's own allocator keeps more.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    # Not every C library has mallopt.
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(parameter, 8 << 20)


def _proven(spec: EncoderSpec, connection: Connection) -> Encode | None:
    """Load the engine and check it against the parent's proof. Report the result to the parent; return None if it fails."""
    try:
        try:
            encode = spec.encoder()
        finally:
            proof = connection.recv()
        proof.check(encode)
    except EngineFault as fault:
        connection.send(str(fault))
        return None
    except BaseException as error:  # noqa: BLE001 - the parent shows it; a Rust panic is not an Exception
        connection.send(Raised.of(error))
        return None
    connection.send(None)
    return encode

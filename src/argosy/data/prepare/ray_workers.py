"""Workers on a Ray cluster, in place of the pool of processes of one machine.

The job hands out blocks as workers become free, so fast machines do more of them. A worker is an actor of one CPU; there are as many as
the cluster has CPUs, and more when nodes join. A block whose worker is lost with its node goes to another one. Parts are files, and
their bytes do not depend on who makes them, so a lost answer does no harm. All nodes must see the inputs and the output directory at the
same paths, and have Argosy installed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy import __version__
from argosy.data.prepare.preview import sample_texts
from argosy.data.prepare.workers import EncoderSpec, Maker, PartRecipe, Raised, Task, make_maker
from argosy.data.text.engines import Encode, EngineFault, Proof
from argosy.data.text.inputs import InputFile, require
from argosy.data.text.tokenizer import Tokenizer
from argosy.errors import ArgosyError
from argosy.extras import install_extra

_log = logging.getLogger(__name__)
# A block, or a start, that so many workers died of is at fault itself.
_MOST_DEATHS = 8
_START = "its start"
# How often new nodes are looked for.
_LOOK_S = 2.0
_CONNECT_S = 10.0


@dataclass(frozen=True)
class Started:
    """What a worker tells when it has started."""

    host: str
    # Ray's id of the node.
    node: str
    version: str
    # The fault of its engine, or an exception.
    fault: str | Raised | None


class RayWorker:
    """The actor: it loads its engine, checks it, and makes parts one after another."""

    def __init__(self, place: str, directory: Path, spec: EncoderSpec | None, options: PartRecipe) -> None:
        # Relative names of inputs are those of the job.
        with contextlib.suppress(OSError):
            os.chdir(place)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.directory, self.spec, self.options = directory, spec, options
        self._encode: Encode | None = None
        self._maker: Maker | None = None

    def start(self, proof: Proof | None) -> Started:
        """Load the engine, and check that it gives the ids of `proof`."""
        node = require("ray", "ray", "`--on ray`").get_runtime_context().get_node_id()
        return Started(socket.gethostname(), node, __version__, self._load(proof))

    def _load(self, proof: Proof | None) -> str | Raised | None:
        try:
            if self.spec is not None and self.spec.engine is not None:
                self._encode = self.spec.encoder()
                if proof is not None:
                    proof.check(self._encode)
        except EngineFault as fault:
            return str(fault)
        except BaseException as error:  # noqa: BLE001 - the job shows it; a Rust panic is not an Exception
            return Raised.of(error)
        return None

    def make(self, name: Any, group: Any) -> Any:
        """Make a part and return its facts, or the exception."""
        try:
            self._maker = self._maker or make_maker(self.directory, self.spec, self.options, self._encode)
            return self._maker.make(name, group)
        except BaseException as error:  # noqa: BLE001 - as above
            return Raised.of(error)


class RayWorkers:
    """The workers of one job on a Ray cluster.

    Args:
        address: `ray` for the cluster of this machine, which is started if there is none; or the address of one.
        directory: The directory of the parts.
        spec: The encoder; None for parts without tokens.
        options: The options of parts.
        sampled: The input groups from which the sample for the engine check is taken.
    """

    def __init__(
        self,
        address: str,
        directory: Path,
        spec: EncoderSpec | None,
        options: PartRecipe,
        *,
        sampled: list[list[InputFile]],
    ) -> None:
        self._ray: Any = require("ray", "ray", "`--on ray`")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._is_ours = not self._ray.is_initialized()
        self._address = address
        if self._is_ours:
            self._connect(None if address == "ray" else address)
        self.engine: str | None = None if spec is None else spec.engine
        self._arguments = str(Path.cwd()), directory.resolve(), spec, options
        self._sampled = sampled
        self._proof: Proof | None = None
        # True once the first worker's engine has passed its check.
        self._proven = False
        # Actors by what they are doing: the reference to the answer -> the actor, with its task.
        self._starting: dict[Any, Any] = {}
        self._busy: dict[Any, tuple[Any, Task]] = {}
        self._idle: list[Any] = []
        # The node of each actor that has started.
        self._nodes: dict[Any, str] = {}
        self._deaths: Counter[str] = Counter()

    def prove(self, reference: Tokenizer) -> None:
        """Start the workers, each of which checks its engine. Raise EngineFault if the first one fails."""
        self._proof = Proof.by(reference, sample_texts(self._sampled, self._arguments[3]))
        self._add_workers()
        while not self._idle:
            self._add_workers()
            for _ in self._wait():
                raise RuntimeError("no task was given out yet")
        self._proven = True

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[Any, Any]]:
        """Yield names and facts as they are finished. Tasks of lost workers are given to others."""
        again: deque[Task] = deque()
        while True:
            self._add_workers()
            while self._idle and (task := again.popleft() if again else next(tasks, None)) is not None:
                actor = self._idle.pop()
                with self._connection():
                    self._busy[actor.make.remote(*task)] = actor, task
            # A worker is idle only if there is no task left.
            if self._idle and not self._busy:
                return
            for task, answer in self._wait():
                if answer is None:
                    again.append(task)
                elif isinstance(answer[0], Raised):
                    raise answer[0].exception()
                else:
                    yield task[0], answer[0]

    def close(self) -> None:
        """Stop the workers, and the connection if this object made it."""
        actors = [*self._idle, *self._starting.values(), *(actor for actor, _ in self._busy.values())]
        # Ray would start a cluster to answer a client that lost its own.
        for actor in actors if self._ray.is_initialized() else ():
            self._ray.kill(actor)
        self._starting, self._busy, self._idle, self._nodes = {}, {}, [], {}
        if self._is_ours:
            self._ray.shutdown()

    def _connect(self, address: str | None) -> None:
        if address is not None:
            _require_answer(address)
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        # Ray raises both: RuntimeError also if the versions of Ray or Python differ.
        except (ConnectionError, RuntimeError) as error:
            raise _no_cluster(self._address, error) from None

    def _add_workers(self) -> None:
        """Start a worker for each CPU that has none."""
        with self._connection():
            wanted = int(self._ray.cluster_resources().get("CPU", 0))
            for _ in range(wanted - len(self._idle) - len(self._busy) - len(self._starting)):
                actor = self._ray.remote(num_cpus=1)(RayWorker).remote(*self._arguments)
                self._starting[actor.start.remote(self._proof)] = actor

    def _wait(self) -> Iterator[tuple[Task, tuple[Any] | None]]:
        """Wait for workers. Yield each task that ended with its answer, or with None if its worker was lost."""
        if not self._starting and not self._busy:
            # The cluster has no CPU now; a node may join.
            time.sleep(_LOOK_S)
            return
        done = self._ended()
        for reference in done:
            starts = reference in self._starting
            actor, task = (self._starting.pop(reference), None) if starts else self._busy.pop(reference)
            try:
                with self._connection():
                    answer = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                self._drop_node(actor)
                self._lost(_START if task is None else task[0], error)
                if task is not None:
                    yield task, None
                continue
            if starts:
                self._started(actor, answer)
            self._idle.append(actor)
            if task is not None:
                yield task, (answer,)

    def _ended(self) -> list[Any]:
        """Return the references of workers that started or ended a task, after a short wait if there is none."""
        with self._connection():
            done, _ = self._ray.wait([*self._starting, *self._busy], num_returns=1, timeout=_LOOK_S)
        return list(done)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[None]:
        """Refuse to go on after the connection was lost. Only a client gets that far: Ray ends a driver that loses its cluster."""
        lost: Exception | None = None
        # Ray would start a cluster to answer a client that lost its own.
        if self._ray.is_initialized():
            try:
                yield
                return
            except Exception as error:
                # Ray raises many kinds of exceptions then.
                if self._ray.is_initialized() and not isinstance(error, ConnectionError):
                    raise
                lost = error
        raise ArgosyError(
            "launch.environment",
            f"the connection to the Ray cluster at {self._address} was lost{f': {lost}' if lost else ''}",
            key="--on",
            value=self._address,
            fix="run the same command again: finished parts are kept",
        ) from None

    def _started(self, actor: Any, started: Started) -> None:
        if started.version != __version__:
            raise ArgosyError(
                "launch.environment",
                f"node {started.host} of the Ray cluster has Argosy {started.version}, and this machine {__version__}",
                key="--on",
                fix=f"install Argosy {__version__} on every node",
            )
        if isinstance(started.fault, Raised):
            raise started.fault.exception()
        if started.fault is not None and self._proven:
            raise ArgosyError(
                "launch.environment",
                f"node {started.host} of the Ray cluster cannot use the tokenizer engine of the other nodes: {self.engine} {started.fault}",
                key="--on",
                fix=f"install the same packages on every node: {install_extra('data')}",
            )
        if started.fault is not None:
            raise EngineFault(started.fault)
        self._nodes[actor] = started.node
        self._deaths.pop(_START, None)

    def _drop_node(self, lost: Any) -> None:
        """Stop the idle workers of a lost worker's node, which are probably lost too. A task would die with each of them."""
        node = self._nodes.pop(lost, None)
        for actor in [actor for actor in self._idle if node is not None and self._nodes[actor] == node]:
            self._idle.remove(actor)
            del self._nodes[actor]
            with self._connection():
                self._ray.kill(actor)

    def _lost(self, name: Any, error: Exception) -> None:
        self._deaths[str(name)] += 1
        _log.info("a Ray worker was lost at %s; another one does it", name)
        if self._deaths[str(name)] >= _MOST_DEATHS:
            raise ArgosyError(
                "data.worker-died",
                f"{_MOST_DEATHS} Ray workers died at {name}: {error}",
                fix="see `ray logs`; is Argosy installed on every node? Then run the same command again: finished parts are kept",
            )


def _require_answer(address: str) -> None:
    """Refuse an address at which nothing listens. Ray itself would try it for many minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise _no_cluster(address, error) from None


def _no_cluster(address: str, error: Exception) -> ArgosyError:
    return ArgosyError(
        "launch.environment",
        f"no Ray cluster answers at {address}: {error}",
        key="--on",
        value=address,
        fix="ray://HEAD:10001 is the port of Ray Client, and HEAD:6379 without ray:// that of the cluster, which `ray status` shows on the "
        "head node; RAY_AUTH_MODE=token if the cluster asks for a token; `--on ray` takes the cluster of this machine, or starts one",
    )

"""CUDA graphs: the forward and backward pass of a micro-batch, captured once and then replayed.

A GPU with few tokens per pass finishes its kernels sooner than the host can launch them, about two thousand in a step. A CUDA
graph launches them all at once. It reads and writes fixed addresses: inputs are copied to where the graph reads them, losses
are copied from where it writes them, and its gradients are assigned to the parameters after each replay. The kernels, their
order and their results are those of an ordinary pass. Of random numbers it knows the generators: their seeds are those of the replay.

The first pass of the second step is timed, of several ranks also that of the third. If the GPU is still busy long after the host has launched everything, the step is not
launch-bound, and nothing is captured. A graph keeps the memory of its pass. If an evaluation runs out of memory beside it on one GPU, the
graphs are released and the evaluation runs again (`CudaGraphs.beside`). Several ranks could not agree on that, since one of them may wait
for the others in a collective: they drop their graphs before an evaluation, and capture them anew after it, unless they were hardly used.

A pass may have collectives, those of FSDP, tensor and context parallelism. NCCL wants a collective to be captured by all of its ranks or by none,
and every rank to replay it, so ranks agree before they replay a new graph (`tell_all`). A communicator is created by its first collective,
which cannot be captured: nothing is captured in the first step. NCCL destroys no communicator that a graph uses: `release_graphs` comes
before the end of the process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from argosy.compat.failed_capture import end_failed_capture
from argosy.errors import ArgosyError
from argosy.model.objective import Loss, Objective
from argosy.parallel.capture_turn import CAPTURE_TURN

T = TypeVar("T")
Inputs = dict[str, Tensor]
# Adds to the gradients.
Pass = Callable[[Inputs, Objective], Loss]
# What is done with passes: they are captured if they are launch-bound, captured always, or launched one by one, and if they are launch-bound
# the user is told that they could be captured.
GraphMode = Literal["auto", "on", "advise"]

# A pass is launch-bound if the GPU finishes within this fraction of the pass after the host. In training the host launches more than
# this pass, and other work may slow it down: a host that takes nearly as long as the GPU would then be the slower one.
_TAIL = 0.25
# The most graphs: each keeps the memory of its gradients.
_MOST = 4
# A capture takes the host about as long as a launched pass, of which a replay saves at least a quarter. Graphs that are dropped after fewer
# replays each, so many times in a row, are not captured again.
_PAYS, _WASTED = 10, 3
# What a user hears of a launch-bound step.
_NEWS: dict[GraphMode, str] = {
    "auto": "capturing a CUDA graph; parallel.graph=off disables it",
    "advise": "parallel.graph=on would capture a pass as a CUDA graph, with its collectives",
}


def _alone(found: Any) -> list[Any]:
    return [found]


@dataclass
class Recording:
    inputs: Inputs
    objective: Objective
    loss: Loss
    # A torch.cuda.CUDAGraph.
    graph: Any
    gradients: list[Tensor | None]
    # Passes that add to these gradients.
    more: dict[object, Recording] = field(default_factory=dict)

    def release(self) -> None:
        """Destroy the graph, and those of the passes that add to its gradients."""
        for recording in self.more.values():
            recording.release()
        self.graph.reset()


class CudaGraphs:
    """A drop-in replacement for a pass: it runs the pass itself at first, and replays its CUDA graph later."""

    def __init__(
        self,
        run: Pass,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        generators: Callable[[torch.device], list[torch.Generator]] = lambda device: [],
        *,
        mode: GraphMode = "auto",
        timings: int = 1,
        tell_all: Callable[[Any], list[Any]] = _alone,
        cut_short: str | None = None,
    ) -> None:
        """Args:
        generators: returns those that the pass draws from with `draw_from`, besides the default one.
        mode: what is done with passes.
        timings: steps whose first pass is timed. A rank is launch-bound if it is in all of them: one may have been held up.
        tell_all: gathers what all ranks have to say, in the order of ranks. All of them call it, at the same pass.
        cut_short: why no pass can be launched after one that ended midway, as a capture may; None if passes can.
        """
        self._run, self._device, self._generators = run, device, generators
        self._timings, self._tell_all, self._cut_short = timings, tell_all, cut_short
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._steps, self._recorded, self._mode = 0, 0, mode
        # Passes replayed by the graphs that there are. So far: passes replayed and launched, and captures that were tried.
        self._replays = self.replayed = self.launched = self.captures = 0
        # How many times in a row the graphs were dropped before their captures had paid.
        self._wasted = 0
        # Milliseconds of the host in the passes that were timed, or None where it was not the limit.
        self._host_ms: list[float | None] = []
        # The memory pool that all graphs share: they never run at the same time.
        self._pool: Any = None
        # Passes that find no gradients.
        self._first: dict[object, Recording] = {}
        # The recording that made the current gradients.
        self._begun: Recording | None = None
        # None: not known yet.
        self.wanted: bool | None = True if mode == "on" else None
        # Messages for the user.
        self._news: list[str] = []
        _live.add(self)

    def __call__(self, inputs: Inputs, objective: Objective) -> Loss:
        begins = all(parameter.grad is None for parameter in self._parameters)
        if begins:
            self._steps += 1
            self._begun = None
            if self._steps > 1 and self.wanted is None:
                return self._timed(inputs, objective)
        if self._steps == 1 or not self.wanted or (self._begun is None and not begins):
            return self._launch(inputs, objective)
        known = self._first if self._begun is None else self._begun.more
        key = _form(inputs, objective, self._parameters)
        if key not in known and (self._recorded == _MOST or not self._record(known, key, inputs, objective)):
            return self._launch(inputs, objective)
        recording = known[key]
        if begins:
            self._begun = recording
        return self._replay(recording, inputs, objective)

    def beside(self, work: Callable[[], T]) -> T:
        """Return what `work` does between two steps. If it needs the memory that the graphs keep, there are none from then on."""
        try:
            return work()
        except torch.OutOfMemoryError:
            if not self._recorded:
                raise
        # Here, where the error has let go of what the work had in memory.
        self.release("no CUDA graph is used from here on: an evaluation needs its memory")
        return work()

    def release(self, why: str | None = None) -> None:
        """Destroy the graphs, and free their memory. No pass is captured from here on. The user is told why, if that is given."""
        self._free()
        self.wanted = False
        if why is not None:
            self._news.append(why)

    def drop(self) -> None:
        """Destroy the graphs, and free their memory. Later passes are captured again if these graphs were worth their captures."""
        if self._recorded:
            self._wasted = self._wasted + 1 if self._replays < _PAYS * self._recorded else 0
        self._free()
        if self._wasted == _WASTED and self.wanted and self._mode != "on":
            self.release(
                f"no CUDA graph is used from here on: evaluations, samples of text or scores of tasks come so often that a pass is replayed "
                f"fewer than {_PAYS} times before it is captured again; parallel.graph=on captures it all the same"
            )

    def destroy(self) -> None:
        """Destroy the graphs without waiting for the device, which may wait for a rank that has failed. Their memory is not freed."""
        while self._first:
            self._first.popitem()[1].release()
        self._begun, self.wanted = None, False

    def _free(self) -> None:
        if self._pool is None:
            return
        # A graph may still run. The allocator, which unmaps the memory of its pool, waits only for the stream of the capture.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        while self._first:
            self._first.popitem()[1].release()
        self._begun, self._pool, self._recorded, self._replays = None, None, 0, 0
        torch.cuda.empty_cache()

    @property
    def owns_gradients(self) -> bool:
        """True if the gradients are where a graph has written them."""
        return self._begun is not None

    def take_news(self) -> list[str]:
        """Return the messages for the user since the last call."""
        news, self._news = self._news, []
        return news

    def _launch(self, inputs: Inputs, objective: Objective) -> Loss:
        self.launched += 1
        return self._run(inputs, objective)

    def _timed(self, inputs: Inputs, objective: Objective) -> Loss:
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        loss = self._launch(inputs, objective)
        host = time.perf_counter()
        torch.cuda.synchronize(self._device)
        ended = time.perf_counter()
        is_bound = ended - host < _TAIL * (ended - started)
        self._host_ms.append(1000 * (host - started) if is_bound else None)
        if len(self._host_ms) < self._timings:
            return loss
        always = [each for each in self._host_ms if each is not None]
        # Ranks wait for the slowest host among them.
        bound = self._tell_all(min(always) if len(always) == self._timings else None)
        slowest = max((each for each in bound if each is not None), default=None)
        self.wanted = slowest is not None and self._mode != "advise"
        if slowest is not None:
            self._news.append(f"step is launch-bound ({slowest:.0f} ms of host time per pass): {_NEWS[self._mode]}")
        return loss

    def _record(self, known: dict[object, Recording], key: object, inputs: Inputs, objective: Objective) -> bool:
        """Capture the pass without running it. Return False if this rank or another one cannot capture it."""
        self.captures += 1
        before = [parameter.grad for parameter in self._parameters]
        recording, problem = None, None
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            generators = self._generators(self._device)
            recording = record(self._run, inputs, objective, self._parameters, self._pool, generators)
        # Out of memory, or an operation that cannot be captured.
        except RuntimeError as error:
            problem = str(error).split("\n", 1)[0]
        if (why := first_problem(self._tell_all(problem))) is None and recording is not None:
            known[key] = recording
            self._recorded += 1
            return True
        if recording is not None:
            recording.release()
        if self._cut_short is not None:
            raise ArgosyError(
                "device.no-graph",
                f"the pass cannot be captured as a CUDA graph ({why}), and {self._cut_short}",
                key="parallel.graph",
                value=self._mode,
                fix="parallel.graph=auto, or a smaller parallel.micro_batch if memory ran out",
            )
        # No graph runs at the moment: a capture begins by waiting for the device.
        self.release(f"no CUDA graph is used: the pass cannot be captured ({why})")
        self._hand(before)
        return False

    def _replay(self, recording: Recording, inputs: Inputs, objective: Objective) -> Loss:
        for name, tensor in inputs.items():
            recording.inputs[name].copy_(tensor)
        for held, given in zip(_numbers(recording.objective), _numbers(objective), strict=True):
            held.copy_(given)
        recording.graph.replay()
        self._replays, self.replayed = self._replays + 1, self.replayed + 1
        self._hand(recording.gradients)
        return _detached(recording.loss, Tensor.clone)

    def _hand(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


def record(
    run: Pass,
    inputs: Inputs,
    objective: Objective,
    parameters: list[nn.Parameter],
    pool: Any,
    generators: list[torch.Generator],
) -> Recording:
    """Capture `run` as a CUDA graph, without running it. Other threads may use the device during the capture; this one may not."""
    inputs = {name: tensor.clone() for name, tensor in inputs.items()}
    objective = _held(objective)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    default, stream = torch.cuda.default_generators[torch.cuda.current_device()], torch.cuda.current_stream()
    own, seed = default.graphsafe_get_state(), default.initial_seed()
    try:
        with CAPTURE_TURN, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            loss = run(inputs, objective)
    except BaseException:
        # A frame of the error may live on, and with it the graph. NCCL destroys no communicator that a graph uses.
        graph.reset()
        # After a capture that failed, torch 2.11 takes the generator to be captured still, and stays on the stream of the capture.
        own = torch.Generator(default.device).manual_seed(seed).graphsafe_get_state()
        torch.cuda.set_stream(stream)
        end_failed_capture(pool)
        raise
    finally:
        default.graphsafe_set_state(own)
    return Recording(inputs, objective, _detached(loss, Tensor.detach), graph, [p.grad for p in parameters])


def is_capturing() -> bool:
    """True while this thread captures a pass."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def draw_from(generator: torch.Generator) -> None:
    """Let the rest of the captured pass draw from this generator, as if it were the device's default one."""
    torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(generator.graphsafe_get_state())


def _form(inputs: Inputs, objective: Objective, parameters: list[nn.Parameter]) -> object:
    """Return the key of a pass: passes with equal keys launch the same kernels."""
    shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
    constants = tuple(value for value in vars(objective).values() if not isinstance(value, Tensor))
    return shapes, constants, len(_numbers(objective)), parameters[0].grad_dtype


def _numbers(objective: Objective) -> list[Tensor]:
    """Return the tensors of an objective: they are on the device, and may change from pass to pass."""
    return [value for value in vars(objective).values() if isinstance(value, Tensor)]


def _held(objective: Objective) -> Objective:
    copies: dict[str, Any] = {
        name: value.clone() for name, value in vars(objective).items() if isinstance(value, Tensor)
    }
    return replace(objective, **copies)


def _detached(loss: Loss, of: Callable[[Tensor], Tensor]) -> Loss:
    load = None if loss.expert_load is None else of(loss.expert_load)
    metrics = {name: of(value.detach()) for name, value in loss.metrics.items()}
    return Loss(loss.total.detach(), of(loss.cross_entropy.detach()), metrics, load)


def first_problem(problems: list[str | None]) -> str | None:
    """Return the problem of the first rank that has one, and which rank that is if there are several."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            return problem if len(problems) == 1 else f"rank {rank}: {problem}"
    return None


_live: WeakSet[CudaGraphs] = WeakSet()


def release_graphs(*, failed: bool = False) -> None:
    """Destroy all CUDA graphs of this process; after a failure without waiting for the device."""
    for graphs in list(_live):
        if failed:
            graphs.destroy()
        else:
            graphs.release()

"""Passes that are recorded and replayed give the gradients and losses of ordinary ones, also without a GPU (`recordings.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from argosy.config.schema import ParallelSpec
from argosy.model.objective import Loss, Objective
from argosy.parallel import cuda_graphs as replay
from argosy.parallel import mesh
from argosy.parallel.cuda_graphs import CudaGraphs, GraphMode, Inputs, Pass
from argosy.parallel.single import SingleDevice
from argosy.supervise.world import World
from parallel.recordings import Rerun, recording_by_rerun

if TYPE_CHECKING:
    from argosy.data.samples.windows import Batch
    from argosy.parallel.transformer_blocks import DropoutSeeds

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.unused = nn.Parameter(torch.zeros(2))

    def learn(self, inputs: Inputs, objective: Objective) -> Loss:
        y = self.inner(inputs["tokens"]).square().sum()
        total = y * objective.scale + objective.z_loss * y
        total.backward()
        return Loss(total, y.detach(), {"doubled": 2 * y.detach()}, None)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The recordings that were made."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(replay, "_TAIL", 1.1)  # so that the host is always the limit
    with recording_by_rerun() as made:
        yield made


def step(model: Model, run: Pass, seed: int, micros: int, rows: int = 5) -> tuple[list[Tensor], list[Loss]]:
    """Gradients of a step over some micro-batches, and the losses as they were found at the end of it."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = None
    losses = []
    for _ in range(micros):
        inputs = {"tokens": torch.randn(rows, 4, generator=draw)}
        losses.append(run(inputs, Objective(scale=torch.rand((), generator=draw), z_loss=0.5)))
    assert model.unused.grad is None
    return [p.grad.clone() for p in model.inner.parameters() if p.grad is not None], losses


def test_every_step_has_the_numbers_of_ordinary_passes(recorded: list[object]) -> None:
    torch.manual_seed(0)
    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), CPU)
    for number, micros in enumerate((1, 1, 1, 3, 1, 2, 3, 4), start=1):
        found, losses = step(model, replays, number, micros)
        expected, ordinary = step(model, model.learn, number, micros)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        for one, other in zip(losses, ordinary, strict=True):
            assert torch.equal(one.cross_entropy, other.cross_entropy)
            assert torch.equal(one.metrics["doubled"], other.metrics["doubled"])
        with torch.no_grad():  # weights change in place, as an optimiser changes them
            model.inner.weight.mul_(1.1)
    assert len(recorded) == 2, "one recording for the first micro-batch of a step, one for those that add to it"


def test_a_pass_whose_first_gradients_were_not_recorded_is_not_replayed_onto_them(recorded: list[object]) -> None:
    torch.manual_seed(0)
    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), CPU)
    for number in (1, 2):  # the first pass of the second step is timed
        found, _ = step(model, replays, number, 4)
        expected, _ = step(model, model.learn, number, 4)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert replays.wanted
    assert not recorded


def test_graphs_are_destroyed_when_the_device_has_ended_them_and_before_their_memory_is_freed(
    recorded: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, done = Model(), list[str]()
    replays = CudaGraphs(model.learn, model.parameters(), torch.device("cuda"))
    for number in range(3):
        step(model, replays, number, 2)
    assert replays.owns_gradients
    destroy = Rerun.reset
    monkeypatch.setattr(Rerun, "reset", lambda self: done.append("destroyed") or destroy(self))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append(f"freed with {len(replays._first)} recordings"))
    replays.drop()
    replays.drop()
    assert done == ["waited", "destroyed", "destroyed", "freed with 0 recordings"]
    assert not replays.owns_gradients
    step(model, replays, 3, 2)
    assert len(recorded) == 4, "captured anew"


def test_other_shapes_get_recordings_of_their_own_and_only_a_few(recorded: list[object]) -> None:
    torch.manual_seed(0)
    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), CPU)
    for number in range(1, 12):
        rows = 3 + number % 7
        found, _ = step(model, replays, number, 1, rows)
        expected, _ = step(model, model.learn, number, 1, rows)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(recorded) == replay._MOST


def test_nothing_is_recorded_where_the_device_is_the_limit(
    recorded: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_TAIL", 0.0)
    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), CPU)
    for number in range(6):
        step(model, replays, number, 2)
    assert not recorded
    assert not replays.take_news()


def test_a_pass_that_cannot_be_recorded_runs_and_says_why(recorded: list[object]) -> None:
    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), CPU)

    def refuse(*arguments: object) -> None:
        for parameter in model.parameters():  # no one may see these
            parameter.grad = torch.full_like(parameter, torch.nan)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    record, tried = replay.record, []

    def record_one(*arguments: object) -> object:
        tried.append(arguments)
        return (record if len(tried) == 1 else refuse)(*arguments)  # type: ignore[operator]

    with patch.object(replay, "record", record_one):
        for number in range(1, 6):
            found, _ = step(model, replays, number, 2)
            expected, _ = step(model, model.learn, number, 2)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(tried) == 2
    assert not replays._first, "the graph that was captured keeps no memory"
    assert replays.take_news()[-1].endswith("cannot be captured (operation not permitted when stream is capturing)")


@pytest.mark.parametrize("micros", [1, 3])
def test_all_passes_but_those_of_the_first_step_are_captured_if_asked(recorded: list[object], micros: int) -> None:
    """Without a pass that is timed. The first step makes the communicators."""
    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), CPU, mode="on")
    with patch.object(replay, "_TAIL", 0.0):
        for number in range(4):
            assert len(recorded) == (0 if number < 2 else min(micros, 2))
            found, _ = step(model, replays, number, micros)
            expected, _ = step(model, model.learn, number, micros)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not replays.take_news()


def test_ranks_capture_if_one_of_them_is_launch_bound_and_all_can(recorded: list[object]) -> None:
    told: list[object] = []
    others: Iterator[object] = iter([7.0, None, "out of memory"])

    def tell_all(mine: object) -> list[object]:
        told.append(mine)
        return [mine, next(others)]

    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), CPU, tell_all=tell_all)
    with patch.object(replay, "_TAIL", 0.0):
        for number in range(4):
            step(model, replays, number, 1)
        assert replays.wanted
        assert len(recorded) == 1
        step(model, replays, 4, 1, rows=3)
    assert told == [None, None, None], "that it is not launch-bound, and that it could capture two passes"
    assert not replays.wanted
    asked, ended = replays.take_news()
    assert asked.startswith("step is launch-bound (7 ms of host time per pass)")
    assert ended == "no CUDA graph is used: the pass cannot be captured (rank 1: out of memory)"


def test_all_graphs_of_a_process_can_be_destroyed(recorded: list[object]) -> None:
    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), CPU)
    for number in range(3):
        step(model, replays, number, 3)
    (first,) = replays._first.values()
    graphs = [recording.graph for recording in (first, *first.more.values())]
    assert len(graphs) == len(recorded) == 2
    replay.release_graphs()
    assert [graph.made for graph in graphs] == [[], []], "reset"
    found, _ = step(model, replays, 3, 2)
    expected, _ = step(model, model.learn, 3, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(recorded) == 2


def test_an_evaluation_that_needs_the_memory_of_the_graphs_gets_it(
    recorded: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), CPU)
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))

    def evaluate() -> str:
        if replays._first or replays._begun:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "evaluated"

    assert replays.beside(evaluate) == "evaluated"
    for number in range(1, 4):
        step(model, replays, number, 1)
    assert recorded
    assert not emptied
    replays.take_news()
    assert replays.beside(evaluate) == "evaluated"
    assert emptied
    assert replays.take_news() == ["no CUDA graph is used from here on: an evaluation needs its memory"]
    count = len(recorded)
    for number in range(4, 7):
        found, _ = step(model, replays, number, 2)
        expected, _ = step(model, model.learn, number, 2)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(recorded) == count


@pytest.mark.parametrize(("host", "is_wanted"), [(0.76, True), (0.74, False)])
def test_a_pass_is_captured_if_the_host_takes_most_of_it(
    host: float, is_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    moments = iter([0.0, host, 1.0])
    monkeypatch.setattr(replay.time, "perf_counter", lambda: next(moments))
    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), CPU)
    for number in range(2):
        step(model, replays, number, 1)
    assert replays.wanted is is_wanted


@pytest.mark.parametrize(("hosts", "told"), [([0.9, 0.3], [None]), ([0.3, 0.9], [None]), ([0.9, 0.8], [800.0])])
def test_a_rank_is_launch_bound_if_the_host_is_the_limit_in_every_step_that_is_timed(
    hosts: list[float], told: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many ranks one is often held up in a step, and all would capture passes for it."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    moments = iter([time for host in hosts for time in (0.0, host, 1.0)])
    monkeypatch.setattr(replay.time, "perf_counter", lambda: next(moments))
    heard: list[object] = []

    def tell_all(mine: object) -> list[object]:
        heard.append(mine)
        return [mine]

    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), CPU, timings=2, tell_all=tell_all)
    for number in range(3):
        assert replays.wanted is None
        step(model, replays, number, 2)
    assert heard == told
    assert replays.wanted is (told != [None])


@pytest.mark.parametrize(("mode", "steps", "given_up"), [("auto", 2, True), ("on", 2, False), ("auto", 6, False)])
def test_graphs_that_are_dropped_too_often_to_pay_are_not_captured_again(
    mode: GraphMode, steps: int, given_up: bool, recorded: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), CPU, mode=mode)
    step(model, replays, 0, 4)
    step(model, replays, 1, 4)
    replays.take_news()
    for number in range(4):
        for _ in range(steps):
            step(model, replays, number, 4)
        replays.drop()
    # Replays a step: one of the first recording, three of the one that adds to it. 10 of each would pay.
    assert replays.wanted is not given_up
    assert len(recorded) == (6 if given_up else 8)
    told = replays.take_news()
    assert [news.startswith("no CUDA graph is used from here on: evaluations") for news in told] == given_up * [True]


def test_after_a_failure_graphs_are_destroyed_without_waiting_for_the_device(
    recorded: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for a rank that has failed."""
    model = Model()
    replays = CudaGraphs(model.learn, model.parameters(), torch.device("cuda"))
    for number in range(3):
        step(model, replays, number, 2)

    def wait(*of: object) -> None:
        raise AssertionError("waited for the device")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "empty_cache", wait)
    (first,) = replays._first.values()
    with pytest.raises(AssertionError, match="waited"):
        replay.release_graphs()
    replay.release_graphs(failed=True)
    assert first.graph.made == []
    assert not replays.wanted
    assert not replays._first


@pytest.mark.parametrize("fits", [True, False], ids=["fits alone", "fits never"])
def test_an_engine_evaluates_beside_its_graphs_and_goes_on_training(
    fits: bool, recorded: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    engine = SingleDevice(model, cast("DropoutSeeds", None), micro_batch=1, device=CPU)
    graphs = engine._graphs = CudaGraphs(model.learn, model.parameters(), CPU)
    for number in range(3):
        step(model, graphs, number, 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def evaluate(batch: object, objective: object) -> str:
        assert not model.training
        if graphs._first or not fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "evaluated"

    monkeypatch.setattr(engine._micro_batches, "evaluate", evaluate)
    batch = cast("Batch", SimpleNamespace(valid_tokens=2, tokens=[0, 1]))
    with nullcontext() if fits else pytest.raises(torch.OutOfMemoryError):
        assert engine.evaluate(batch) == "evaluated"
    assert model.training
    assert not graphs._first


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_are_destroyed_before_the_communicators_that_they_use(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL would wait for them. It must not register their buffers, which the allocator may move."""
    done: list[str] = []

    def release(*, failed: bool) -> None:
        assert not failed
        done.append("graphs")
        if fails:
            raise RuntimeError("CUDA error")

    # All of these are as before at the end of the test.
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCH_GLOO_LAZY_INIT", "NCCL_GRAPH_REGISTER"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    monkeypatch.setattr(
        mesh.dist, "init_process_group", lambda *of, **how: done.append(os.environ["NCCL_GRAPH_REGISTER"])
    )
    monkeypatch.setattr(mesh, "make_mesh", lambda parallel, device: mesh.Mesh(device))
    monkeypatch.setattr(mesh, "release_graphs", release)
    monkeypatch.setattr(mesh.dist, "destroy_process_group", lambda: done.append("communicators"))
    parallel = ParallelSpec(micro_batch=1, dp_replicate=2)
    with (
        pytest.raises(RuntimeError, match="CUDA error") if fails else nullcontext(),
        mesh.joined(parallel, World(size=2), torch.device("cuda")),
    ):
        done.append("run")
    assert done == ["0", "run", "graphs", "communicators"]


@pytest.mark.parametrize("ended", [True, False])
def test_a_capture_that_fails_leaves_a_new_generator_the_stream_and_neither_graph_nor_allocation(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a failed capture cannot be used: stand-ins say which were left, and what was freed."""
    current = {"state": "own", "stream": "usual"}
    freed: list[str] = []

    def end(device: int, pool: str) -> None:
        if ended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        freed.append(f"ended {device} {pool}")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: freed.append(f"released {device} {pool}"))

    class Generator:
        device = CPU

        def __init__(self, device: object = None) -> None:
            self.state = "own" if device is None else "new"

        def initial_seed(self) -> int:
            return 7

        def manual_seed(self, seed: int) -> Generator:
            self.state += f" {seed}"
            return self

        def graphsafe_get_state(self) -> str:
            return self.state

        def graphsafe_set_state(self, state: str) -> None:
            current["state"] = state

    @contextmanager
    def capture(graph: object, **options: object) -> Iterator[None]:
        current["stream"] = "side"
        yield

    class Graph:
        def reset(self) -> None:
            freed.append("graph")

    for name, stand_in in {
        "CUDAGraph": Graph, "default_generators": [Generator()], "current_device": lambda: 0, "graph": capture,
        "current_stream": lambda: "usual", "set_stream": lambda stream: current.update(stream=stream),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch, "Generator", Generator)

    def refuse(inputs: Inputs, objective: Objective) -> Loss:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        replay.record(refuse, {}, Objective(), [], "pool", [])
    assert current == {"state": "new 7", "stream": "usual"}
    assert freed == ["graph", *([] if ended else ["ended 0 pool", "released 0 pool"])]

"""Passes of several ranks that are captured as CUDA graphs, with their collectives: the numbers of one process, and the bits of passes
that are launched one by one. On a GPU (`make test-gpu`) they are captured; on a CPU a stand-in runs them again (`recordings.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from argosy.config.schema import RunSpec
from argosy.data.samples.windows import Batch
from argosy.errors import ArgosyError
from argosy.model.objective import Loss
from argosy.parallel import cuda_graphs, data_parallel, graph_trial, parallelize, replicas
from argosy.parallel.cuda_graphs import CudaGraphs, Recording
from argosy.parallel.data_parallel import Reduction
from argosy.parallel.fsdp import units
from dist import training
from dist.devices import ON_GPU
from dist.pool import Pool
from dist.test_matrix import require_equal, run
from dist.training import Trace, batch_of, train_steps
from parallel.recordings import recording_by_rerun

STEPS = 4
# A model, its layout, and the passes that are recorded: the first of a step, and one that adds to its gradients.
LAYOUTS = [
    ("gpt", "dp_replicate=2", 2),
    ("llama", "dp_replicate=2 micro_batch=8", 1),
    ("llama", "dp_replicate=2 micro_batch=2", 2),
    ("gpt", "dp_replicate=2 reduce=bf16 train.precision=bf16", 2),
    ("gpt", "dp_replicate=2 model.dropout=0.1", 2),
    ("moe", "dp_replicate=4 train.precision=bf16", 1),
    ("gpt", "tp=2", 2),
    ("moe", "tp=2 sp=false train.precision=bf16 model.moe.ffn=32", 2),
    ("llama", "tp=2 train.z_loss=0.1 model.qk_norm=true", 2),
    ("llama", "tp=2 recompute=selective", 2),
    ("bert", "tp=2", 2),
    ("t5", "tp=2 dp_replicate=2 micro_batch=8", 1),
    ("lora", "tp=2 micro_batch=16", 1),
    ("moe", "cp=2 train.precision=bf16", 2),
    ("gpt", "cp=2 cp_kind=ulysses", 2),
    ("llama", "dp_replicate=2 cp=2 tp=2", 2),
    ("llama", "dp_shard=2", 2),
    ("gpt", "dp_shard=4 micro_batch=4 train.precision=bf16", 1),
    ("llama", "dp_shard=2 reshard=false train.precision=bf16", 2),
    ("moe", "dp_shard=2 train.precision=bf16 recompute=selective", 2),
    ("gpt", "dp_shard=2 model.dropout=0.1", 2),
    ("lora", "dp_shard=2 micro_batch=8", 1),
    ("llama", "dp_shard=2 tp=2 recompute=full", 2),
    ("llama", "dp_shard=2 cp=2", 2),
    ("t5", "dp_shard=4 micro_batch=4", 1),
    ("moe", "dp_shard=2 tp=2 sp=false train.precision=bf16 model.moe.ffn=32", 2),
]


class Captured(NamedTuple):
    """What one rank saw, how many recordings were tried, what the user was told, and whether passes are replayed at the end."""

    trace: Trace
    tried: int
    news: list[str]
    replays: bool


def train_captured(
    model: str, layout: str, steps: int, how: str = "as usual", evaluates: Sequence[int] = (), graph: str = "on"
) -> Captured:
    made: list[data_parallel.DataParallel] = []
    engine = data_parallel.DataParallel

    def kept(*arguments: Any, **options: Any) -> data_parallel.DataParallel:
        made.append(engine(*arguments, **options))
        return made[-1]

    with _recording(how) as tried, patch.object(data_parallel, "DataParallel", kept):
        trace = train_steps(model, f"{layout} graph={graph}", steps, evaluates)
    return Captured(trace, len(tried), made[0].news(), made[0].uses_cuda_graph)


@contextmanager
def _recording(how: str) -> Iterator[list[object]]:
    tried: list[object] = []
    refusal = parallelize.graph_refusal

    def of_gpu(spec: RunSpec, precision: str, device: torch.device) -> str | None:
        return refusal(spec, precision, torch.device("cuda"))

    with (
        nullcontext() if ON_GPU else recording_by_rerun(),
        patch.object(parallelize, "graph_refusal", of_gpu),
    ):
        record = cuda_graphs.record

        def counted(*arguments: Any) -> Recording:
            tried.append(arguments)
            return RECORDERS[how](record, *arguments)

        with patch.object(cuda_graphs, "record", counted):
            yield tried


def _as_usual(record: Callable[..., Recording], *arguments: Any) -> Recording:
    return record(*arguments)


def _not_on_the_last_rank(record: Callable[..., Recording], *arguments: Any) -> Recording:
    """The others record, which runs nothing."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("out of memory\nand more")
    _, inputs, objective, parameters, *_ = arguments
    nothing = torch.zeros(())
    return Recording(inputs, objective, Loss(nothing, nothing, {}, None), Graph(), [None] * len(parameters))


class Graph:
    def reset(self) -> None:
        Graph.resets += 1

    resets = 0


def _not_to_the_end(record: Callable[..., Recording], *arguments: Any) -> Recording:
    """The pass's collectives have been captured when it fails, with an error that outlives it."""
    run, *others = arguments
    error = RuntimeError("out of memory")

    def failing(*inputs: Any) -> Loss:
        run(*inputs)
        raise error

    return record(failing, *others)


RECORDERS = {
    "as usual": _as_usual,
    "not on the last rank": _not_on_the_last_rank,
    "not to the end": _not_to_the_end,
}


def resets() -> int:
    """Return how many of this rank's graphs were destroyed, and forget them."""
    count, Graph.resets = Graph.resets, 0
    return count


def require_same_bits(one: Trace, other: Trace) -> None:
    assert (one.losses, one.norms) == (other.losses, other.norms)
    assert all(np.array_equal(weight, other.weights[name]) for name, weight in one.weights.items())


@pytest.mark.parametrize(("model", "layout", "recordings"), LAYOUTS)
def test_captured_passes_have_the_bits_of_launched_ones_and_in_32_bits_the_numbers_of_one_process(
    pool: Pool, model: str, layout: str, recordings: int
) -> None:
    found: list[Any] = run(pool, model, layout, train_captured, steps=STEPS)
    launched = run(pool, model, layout, steps=STEPS)
    for captured, trace in zip(found, launched, strict=True):
        assert (captured.tried, captured.news, captured.replays) == (recordings, [], True)
        require_same_bits(captured.trace, trace)
    if "bf16" not in layout:
        require_equal(model, layout, [captured.trace for captured in found])


def train_timed(model: str, layout: str, steps: int, tails: list[float]) -> Captured:
    """Let a rank find its pass launch-bound where its entry of `tails` is above 1, and not where it is 0."""
    with (
        patch.object(cuda_graphs, "_TAIL", tails[dist.get_rank()]),
        nullcontext() if ON_GPU else patch.object(torch.cuda, "synchronize", lambda device: None),
    ):
        return train_captured(model, layout, steps, graph="auto")


@pytest.mark.parametrize(("layout", "recordings"), [("dp_replicate=2 micro_batch=8", 1), ("dp_replicate=2", 2)])
def test_all_ranks_capture_a_pass_that_is_launch_bound_on_one(pool: Pool, layout: str, recordings: int) -> None:
    found: list[Any] = run(pool, "llama", layout, train_timed, [0.0, 1.1], steps=STEPS)
    for captured, trace in zip(found, run(pool, "llama", layout, steps=STEPS), strict=True):
        assert (captured.tried, captured.replays) == (recordings, True)
        assert [news.split(" (")[0] for news in captured.news] == ["step is launch-bound"]
        require_same_bits(captured.trace, trace)


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2 micro_batch=8", "cp=2 dp_shard=2"])
def test_a_launch_bound_pass_with_collectives_is_told_and_not_captured(pool: Pool, layout: str) -> None:
    found: list[Any] = run(pool, "llama", layout, train_timed, [0.0, 1.1, 0.0, 0.0], steps=STEPS)
    for captured, trace in zip(found, run(pool, "llama", layout, steps=STEPS), strict=True):
        assert (captured.tried, captured.replays) == (0, False)
        [news] = captured.news
        assert news.startswith("step is launch-bound (")
        assert news.endswith("per pass): parallel.graph=on would capture a pass as a CUDA graph, with its collectives")
        require_same_bits(captured.trace, trace)


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_replicate=4 micro_batch=4", "dp_shard=2"])
def test_nothing_is_captured_where_no_rank_is_launch_bound(pool: Pool, layout: str) -> None:
    found: list[Any] = run(pool, "llama", layout, train_timed, [0.0] * 8, steps=STEPS)
    for captured, trace in zip(found, run(pool, "llama", layout, steps=STEPS), strict=True):
        assert (captured.tried, captured.news, captured.replays) == (0, [], False)
        require_same_bits(captured.trace, trace)


@pytest.mark.parametrize("layout", ["dp_replicate=2", "tp=2", "dp_shard=2", "dp_shard=2 train.precision=bf16"])
def test_an_evaluation_between_replays_changes_nothing(pool: Pool, layout: str) -> None:
    """Of what it leaves behind, no graph may read anything when it is replayed the second time."""
    keys = f"{layout} micro_batch=4 model.layers=2"
    found: list[Any] = pool.run(2, train_captured, "llama", keys, 7, "as usual", (1, 2, 4))
    for captured, trace in zip(found, pool.run(2, train_steps, "llama", keys, 7), strict=True):
        # In steps 2, 3 and 5, the last micro-batch too: the graphs make room for an evaluation.
        assert (captured.tried, captured.replays) == (6, True)
        require_same_bits(captured.trace, trace)


def gathered_before_passes(model: str, layout: str, steps: int) -> list[int]:
    """Return how many of FSDP's units have gathered weights when a captured pass begins."""
    gathered, run_micro = [], data_parallel.DataParallel._run_micro

    def looked(engine: data_parallel.DataParallel, *arguments: Any) -> Loss:
        if cuda_graphs.is_capturing():
            groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units(engine.model)]
            gathered.append(sum(group.is_unsharded for group in groups if group is not None))
        return run_micro(engine, *arguments)

    with patch.object(data_parallel.DataParallel, "_run_micro", looked):
        train_captured(model, layout, steps, evaluates=range(steps))
    return gathered


@pytest.mark.parametrize("layout", ["dp_shard=2 micro_batch=4", "dp_shard=2 micro_batch=4 reshard=false"])
def test_a_captured_pass_gathers_the_weights_that_an_evaluation_has_gathered(pool: Pool, layout: str) -> None:
    """A replay would read them where that evaluation had them."""
    for gathered in pool.run(2, gathered_before_passes, "llama", f"{layout} model.layers=2", STEPS):
        assert gathered
        assert not any(gathered)


def test_no_rank_replays_a_pass_that_one_of_them_cannot_capture(pool: Pool) -> None:
    """NCCL would wait for ever."""
    layout = "dp_replicate=2 micro_batch=8"
    first, last = run(pool, "llama", layout, train_captured, "not on the last rank", steps=STEPS)
    for captured, trace in zip((first, last), run(pool, "llama", layout, steps=STEPS), strict=True):
        assert (captured.tried, captured.replays) == (1, False)
        require_same_bits(captured.trace, trace)
    said = ["no CUDA graph is used: the pass cannot be captured (rank 1: out of memory)"]
    assert first.news == last.news == said
    assert pool.run(2, resets) == [1, 0]


def train_lengths(model: str, layout: str, steps: int, graph: str) -> Captured | Trace:
    """Train on sequences of three lengths, each for two steps: more kinds of passes than there are graphs."""

    def batch(model: str, step: int) -> Batch:
        whole, length = batch_of(model, step), training.SEQ >> (step - 1) // 2
        return Batch(whole.tokens[:, :length], whole.labels[:, :length])

    with patch.object(training, "batch_of", batch):
        return train_captured(model, layout, steps) if graph == "on" else train_steps(model, layout, steps)


@pytest.mark.parametrize("layout", ["dp_replicate=2", "tp=2", "dp_shard=2"])
def test_a_pass_that_is_launched_after_replayed_ones_sums_its_gradients_once(pool: Pool, layout: str) -> None:
    found: list[Any] = run(pool, "gpt", layout, train_lengths, "on", steps=6)
    for captured, trace in zip(found, run(pool, "gpt", layout, train_lengths, "off", steps=6), strict=True):
        assert captured.tried == 4
        require_same_bits(captured.trace, trace)


def train_watched(model: str, layout: str, steps: int) -> list[str]:
    """Return the phases of the steps and what was done with their gradients, in order."""
    done: list[str] = []
    arm, finish, replay = Reduction.arm, Reduction.sum_gradients, CudaGraphs._replay
    places = dict[nn.Parameter, int]()

    def armed(reduction: Reduction) -> None:
        done.append("armed")
        arm(reduction)

    def replayed(graphs: CudaGraphs, *arguments: Any) -> Loss:
        done.append("replayed")
        loss = replay(graphs, *arguments)
        places.update({p: p.grad.data_ptr() for p in graphs._parameters if p.grad is not None})
        return loss

    def summed(reduction: Reduction, **how: bool) -> None:
        finish(reduction, **how)
        kept = places and all(p.grad is not None and p.grad.data_ptr() == place for p, place in places.items())
        done.append("summed in place" if kept else "summed")

    with (
        patch.object(data_parallel, "ignore_phase", done.append),
        patch.object(Reduction, "arm", armed),
        patch.object(Reduction, "sum_gradients", summed),
        patch.object(CudaGraphs, "_replay", replayed),
    ):
        train_captured(model, layout, steps)
    return done


@pytest.mark.parametrize("layout", ["dp_replicate=2 micro_batch=4", "tp=2 micro_batch=8"])
def test_gradients_are_summed_beside_a_pass_that_is_launched_and_after_one_that_is_replayed(
    pool: Pool, layout: str
) -> None:
    """In the phase of communication: a rank that waits for a slow one must not seem as slow."""

    before, after = ["communication", "forward_backward"], ["communication"]
    # Ranks tell each other that they have captured a pass.
    captured = ["communication", "forward_backward", "replayed"]
    first = [*before, "armed", *after, "summed"]
    second = [*before, *captured, *captured, *after, "summed in place"]
    other = [*before, "replayed", "replayed", *after, "summed in place"]
    for done in pool.run(2, train_watched, "llama", f"{layout} model.layers=2", STEPS):
        assert done == first + second + (STEPS - 2) * other


def train_launching_last(model: str, layout: str, steps: int) -> list[str]:
    """Let a step's first pass be replayed and its last be launched: there is one graph more than there may be."""
    with patch.object(cuda_graphs, "_MOST", 1):
        return train_watched(model, layout, steps)


def test_gradients_of_a_graph_stay_where_they_are_when_the_last_pass_is_launched(pool: Pool) -> None:
    for done in pool.run(2, train_launching_last, "llama", "dp_replicate=2 micro_batch=4 model.layers=2", STEPS):
        assert done.count("replayed") == STEPS - 1
        assert done.count("summed in place") == STEPS - 1
        assert done.count("armed") == 1, "beside the only pass before which no graph had written gradients"


def most_sums_at_a_time(model: str, layout: str, steps: int) -> list[int]:
    """Return, for each step, the most buckets whose sums were under way at a time."""
    most: list[int] = []
    start, finish = replicas.start_sum, Reduction.sum_gradients
    under_way = [0]

    class Work:
        def __init__(self, work: Any) -> None:
            self._work = work
            under_way[0] += 1
            most[-1] = max(most[-1], under_way[0])

        def wait(self) -> None:
            self._work.wait()
            under_way[0] -= 1

    def summed(reduction: Reduction, **how: bool) -> None:
        finish(reduction, **how)
        most.append(0)

    most.append(0)
    with (
        patch.object(replicas, "_LARGEST_BUCKET", 2**10),
        patch.object(replicas, "_SMALLEST_BUCKET", 2**10),
        patch.object(replicas, "start_sum", lambda flat, group: Work(start(flat, group))),
        patch.object(Reduction, "sum_gradients", summed),
    ):
        train_captured(model, layout, steps)
    return most[:-1]


def test_sums_of_gradients_that_a_graph_keeps_take_the_memory_of_two_buckets(pool: Pool) -> None:
    for first, *others in pool.run(2, most_sums_at_a_time, "llama", "dp_replicate=2 model.layers=2", STEPS):
        assert first > 2
        assert others == (STEPS - 1) * [2]


def score_on_the_first(model: str, layout: str, steps: int) -> Captured:
    """Between steps, compute logits on the first rank alone, as where there are fewer batches than ranks."""
    step = training.take_step

    def and_logits(engine: Any, *arguments: Any, **options: Any) -> Any:
        taken = step(engine, *arguments, **options)
        if dist.get_rank() == 0:
            with torch.no_grad():
                engine.logits(torch.zeros(1, 4, dtype=torch.int64, device=engine.device), logits_at=None)
        return taken

    with patch.object(training, "take_step", and_logits):
        return train_captured(model, layout, steps)


def test_logits_that_only_some_ranks_compute_leave_the_graphs_of_all(pool: Pool) -> None:
    """A rank that dropped its graphs alone would wait for the others to capture new ones. Who needs room asks for it on all ranks."""
    found: list[Any] = run(pool, "llama", "dp_replicate=2 micro_batch=8", score_on_the_first, steps=STEPS)
    for captured, trace in zip(found, run(pool, "llama", "dp_replicate=2 micro_batch=8", steps=STEPS), strict=True):
        assert (captured.tried, captured.news) == (1, [])
        require_same_bits(captured.trace, trace)


def refusals(whys: list[str | None], graph: str) -> str | None:
    mesh: Any = SimpleNamespace(devices=object(), device=torch.device("cuda"))
    spec: Any = SimpleNamespace(parallel=SimpleNamespace(graph=graph))
    with patch.object(parallelize, "graph_refusal", lambda *of: whys[dist.get_rank()]):
        return parallelize.all_graph_refusal(spec, "bf16", mesh)


def test_no_rank_captures_where_the_software_of_one_cannot(pool: Pool) -> None:
    """It would wait for that rank, which takes no part in what ranks tell each other of their graphs."""
    found = pool.run(3, refusals, [None, "not by Argosy's own kernels", None], "auto")
    assert found == 3 * ["rank 1: not by Argosy's own kernels"]
    assert pool.run(3, refusals, 3 * [None], "on") == 3 * [None]


def train_by_the_clock(model: str, layout: str, steps: int, launched: float, replayed: float) -> Captured:
    """Let the clock tell seconds of launched and of replayed passes; those of one rank count, the others take no time."""
    now = [0.0]
    launch, replay = CudaGraphs._launch, CudaGraphs._replay

    def lasting(seconds: float, run: Callable[..., Loss]) -> Callable[..., Loss]:
        def timed(graphs: CudaGraphs, *arguments: Any) -> Loss:
            now[0] += seconds if dist.get_rank() == 1 else 0
            return run(graphs, *arguments)

        return timed

    with (
        patch.object(graph_trial, "time", SimpleNamespace(perf_counter=lambda: now[0])),
        patch.object(CudaGraphs, "_launch", lasting(launched, launch)),
        patch.object(CudaGraphs, "_replay", lasting(replayed, replay)),
    ):
        return train_timed(model, layout, steps, [1.1, 1.1])


@pytest.mark.parametrize(("launched", "replayed", "kept"), [(0.02, 0.03, False), (0.03, 0.02, True)])
def test_graphs_of_several_ranks_are_given_up_if_steps_take_longer_with_them(
    pool: Pool, launched: float, replayed: float, kept: bool
) -> None:
    """All ranks decide by the slowest of them, after two launched steps and two replayed ones besides those that create and capture."""
    layout, steps = "dp_replicate=2 micro_batch=4 model.layers=2", 8
    found: list[Any] = run(pool, "llama", layout, train_by_the_clock, launched, replayed, steps=steps)
    for captured, trace in zip(found, run(pool, "llama", layout, steps=steps), strict=True):
        assert (captured.tried, captured.replays) == (2, kept)
        told = "no CUDA graph is used from here on: a step took 60.0 ms with them and 40.0 without"
        assert [news.startswith(told) for news in captured.news[1:]] == ([] if kept else [True])
        require_same_bits(captured.trace, trace)


@pytest.mark.parametrize("layout", ["dp_replicate=2 micro_batch=8", "tp=2 micro_batch=16"])
def test_a_capture_that_fails_after_its_collectives_leaves_none_of_them(pool: Pool, layout: str) -> None:
    found: list[Any] = run(pool, "llama", layout, train_captured, "not to the end", steps=STEPS)
    for captured, trace in zip(found, run(pool, "llama", layout, steps=STEPS), strict=True):
        assert (captured.tried, captured.replays) == (1, False)
        require_same_bits(captured.trace, trace)


def refused(model: str, layout: str, steps: int, how: str) -> tuple[str, str]:
    with pytest.raises(ArgosyError) as error:
        train_captured(model, layout, steps, how)
    return error.value.code, error.value.cause


@pytest.mark.parametrize("how", ["not to the end", "not on the last rank"])
def test_all_ranks_end_where_a_capture_fails_midway_in_a_pass_of_fsdp(pool: Pool, how: str) -> None:
    """FSDP would wait in the next pass for what this one has left undone."""
    for code, cause in run(pool, "llama", "dp_shard=2 micro_batch=8", refused, how, steps=STEPS):
        assert code == "device.no-graph"
        assert cause.endswith("out of memory), and with dp_shard no pass can follow one that ended midway")
        assert ("(rank 1: out of memory)" in cause) or how == "not to the end"
    if how == "not on the last rank":
        assert pool.run(2, resets) == [1, 0]

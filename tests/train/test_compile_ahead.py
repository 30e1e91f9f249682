"""The kernels of a run's first steps are compiled ahead of them: those that the run launches, under the keys by which it finds them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.model.ops import hopper
from argosy.model.ops.choice import Gpu
from argosy.supervise.world import World
from argosy.train import compile_ahead, run
from argosy.train.compile_ahead import compiling_ahead, twin_of

H200, A100 = Gpu((9, 0), 132), Gpu((8, 0), 108)
GPU = torch.device("cuda")
started = compile_ahead._started  # some tests put another function in its place
NEEDED = ["data.train=synthetic", "train.steps=9", "optim.lr=1e-3", "eval=off"]
SMALL = ["model.layers=2", "train.global_batch=8", "parallel.micro_batch=4"]


def spec_of(*keys: str) -> RunSpec:
    return resolve(None, [*NEEDED, *keys]).spec


# Takes the steps of each case, and prints which kernels they launch, and what the second step fills and copies by operations of torch's.
# The interpreter, which other tests use, would run the kernels.
STEPS = """
import contextlib, json, sys
from unittest.mock import patch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction
from argosy.config.resolve import resolve
from argosy.model.ops import beside, choice, cross_entropy, hopper, matmul
from argosy.train import compile_ahead

hopper._TRITON = "3.7.1"
# A matmul of a GPU writes 32 bits, or adds to them.
matmul.add_product = cross_entropy.add_product = lambda total, a, b: (
    a.new_empty(len(a), b.shape[1], dtype=torch.float32) if total is None else total
)
take_step = compile_ahead.take_step
moving = {"zeros", "zeros_like", "new_zeros", "zero_", "fill_", "clone", "copy_", "_to_copy"}

class Moved(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        if name in moving and result.numel() >= 2**20:
            moved.append([name, [*result.shape]])
        return result

def watched(*arguments, step, **options):
    with Moved() if step == 2 else contextlib.nullcontext():
        return take_step(*arguments, step=step, **options)

found = []
for keys, capability, processors, precision in json.load(sys.stdin):
    names, moved = set(), []
    def launch(kernel, *arguments, grid, warmup, **options):
        names.add(kernel.fn.__name__)
    nothing = lambda capability, threads: contextlib.nullcontext()
    with (
        patch.object(JITFunction, "run", launch), patch.object(compile_ahead, "compiling_only", nothing),
        patch.object(compile_ahead, "take_step", watched),
    ):
        gpu = choice.Gpu(tuple(capability), processors)
        beside._runs_on.cache_clear(), beside.fits.cache_clear()
        compile_ahead.compile_kernels(compile_ahead.twin_of(resolve(None, keys).spec), precision, gpu, 1)
    assert not choice._on_meta
    found.append([sorted(names), moved])
print(json.dumps(found))
"""


class Steps(NamedTuple):
    """The kernels that a case launches, and the large tensors that its second step fills or copies: by which operation, and their shapes."""

    kernels: set[str]
    moved: list[list[Any]]


@pytest.fixture(scope="module")
def launched() -> list[Steps]:
    cases = [([*NEEDED, *keys], *gpu, precision) for keys, gpu, precision, *_ in LAUNCHED]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "ARGOSY_KERNELS")
    }
    done = subprocess.run(
        [sys.executable, "-c", STEPS], input=json.dumps(cases), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [Steps(set(names), moved) for names, moved in json.loads(done.stdout)]


LAUNCHED = [
    (
        ["model=gpt2", "data.seq_len=1024", "train.global_batch=64", "parallel.micro_batch=32", "model.layers=2"], H200, "bf16",
        {"_attention_forward", "_attention_backward_head", "_softmax_loss", "adamw_kernel", "_square_sums", "_add_uses", "_gemm_beside"},
        {"_attention_backward", "_split"},
    ),
    (
        ["model=llama3-1b", "data.seq_len=8192", "model.layers=2", "train.global_batch=4", "parallel.micro_batch=4"], H200, "bf16",
        {"_attention_backward", "_attention_after", "_gemm_beside", "_split", "_join"}, {"_gated_forward", "_round"},
    ),
    (
        ["model=llama3-1b", "data.seq_len=8192", "model.layers=2", "train.global_batch=4", "parallel.micro_batch=4"], A100, "bf16",
        {"_gated_forward", "_gated_backward", "_split"}, {"_attention_forward", "_gemm_beside"},
    ),
    (
        ["model=llama3-8b", "model.layers=1", "model.vocab_size=512", "data.seq_len=1024", "train.global_batch=1"], H200, "fp8",
        {"_attention_backward_128", "_round", "_differentiate", "_rounded_gradient"}, {"_softmax_loss"},
    ),
    (
        ["model=llama3-1b", "data.seq_len=1024", "data.document_mask=true", "parallel.recompute=selective", "optim.name=muon", *SMALL],
        H200, "bf16", {"_attention_forward", "_gated_forward", "adamw_kernel"}, {"_gemm_beside"},
    ),
    (["model=moe-3.5b-a1.1b", "data.seq_len=1024", *SMALL], H200, "bf16", {"_gather_sum", "_weighted_backward"}, set()),
    (["model=bert-base", *SMALL], H200, "bf16", {"_forward", "_softmax_loss"}, {"_attention_forward"}),
    (["model=t5-small", "data.seq_len=512", *SMALL], A100, "fp16", {"_forward", "_softmax_loss"}, set()),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(LAUNCHED)), ids=[case[0][0].removeprefix("model=") for case in LAUNCHED])
def test_two_steps_on_the_meta_device_launch_what_a_gpu_of_that_kind_would(case: int, launched: list[Steps]) -> None:
    *_, among, without = LAUNCHED[case]
    assert among <= launched[case].kernels
    assert not without & launched[case].kernels


def test_a_step_fills_no_matrix_but_the_gradient_of_its_table(launched: list[Steps]) -> None:
    """autograd fills one for an output of a function that nothing differentiates, and converts each gradient to the type of its sum."""
    summed, once = launched[0].moved, launched[1].moved
    assert once == [["zeros", [128_256, 2048]]]
    # Micro-batches add to the table's gradient.
    assert summed == []


TINY = [
    "model={family: llama, layers: 1, hidden: 64, heads: 2, vocab_size: 128}", "data.seq_len=32", "train.global_batch=4",
    "parallel.micro_batch=2", "train.precision=bf16",
]  # fmt: skip
# The same steps with memory, on a CPU: the kernels get pointers and are compiled, and run nothing.
WITH_MEMORY = """
import sys, orjson, torch
from argosy.compat import set_deterministic
from argosy.compat.kernel_compiler import compiling_only
from argosy.config.schema import RunSpec
from argosy.data.synthetic import synthetic_batch
from argosy.model.ops import choice
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import parallelize
from argosy.train.optimizer import Optimizer
from argosy.train.step import take_step

spec = RunSpec.model_validate(orjson.loads(sys.stdin.buffer.read())["spec"])
set_deterministic(True)
with compiling_only((8, 0), 2), choice.kernels(True):
    engine = parallelize(spec, Mesh(torch.device("cpu")), precision="bf16")
    optimizer = Optimizer(engine.model, spec.optim, guard=spec.guard)
    for step in (1, 2):
        take_step(engine, optimizer, synthetic_batch(spec), step=step, lr=1e-3)
"""


def cubins(cache: Path) -> dict[str, str]:
    """Kernels by their keys in a cache."""
    return {path.parent.name: path.stem for path in cache.glob("*/*.cubin")}


def test_a_run_finds_what_was_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of the other process are those of the same steps when their tensors have memory."""
    for name in ("TRITON_INTERPRET", "ARGOSY_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    twin, note = twin_of(spec_of(*TINY)), tmp_path / "ahead" / "argosy-note"
    assert twin is not None
    spec = twin.model_dump(mode="json")
    request = json.dumps({"spec": spec, "precision": "bf16", "gpu": [[8, 0], 1], "note": str(note)}).encode()
    for cache, program in (("ahead", ["-P", "-m", "argosy.train.compile_ahead"]), ("launched", ["-c", WITH_MEMORY])):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / cache))
        done = subprocess.run([sys.executable, *program], input=request, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
    assert note.exists()
    ahead, launched = cubins(tmp_path / "ahead"), cubins(tmp_path / "launched")
    assert {"_forward", "_gated_backward", "_softmax_loss", "adamw_kernel"} <= set(launched.values())
    assert {key: name for key, name in launched.items() if key not in ahead} == {}


@pytest.mark.parametrize(
    ("problem", "noted"),
    [(None, True), (RuntimeError("no meta kernel"), True), (OSError(errno.ENOSPC, "No space left"), False), (MemoryError(), False)],
)  # fmt: skip
def test_a_step_that_the_meta_device_cannot_take_is_not_tried_at_every_start(
    problem: Exception | None, noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may go better the next time is tried again."""
    spec = spec_of(*TINY).model_dump(mode="json")
    note = tmp_path / "cache" / "argosy-note"
    request = {"spec": spec, "precision": "bf16", "gpu": [[8, 0], 1], "note": str(note)}
    monkeypatch.setattr(compile_ahead.sys, "stdin", SimpleNamespace(buffer=BytesIO(json.dumps(request).encode())))
    lives: list[int] = []
    monkeypatch.setattr(compile_ahead.signal, "alarm", lives.append)
    monkeypatch.setattr(os, "nice", lives.append)
    monkeypatch.setattr(compile_ahead, "available_cores", lambda: 7)

    def compile_kernels(spec: RunSpec, precision: str, gpu: Gpu, threads: int) -> None:
        assert (precision, gpu) == ("bf16", ((8, 0), 1))
        assert threads == 3
        if problem is not None:
            raise problem

    monkeypatch.setattr(compile_ahead, "compile_kernels", compile_kernels)
    with nullcontext() if problem is None else pytest.raises(type(problem)):
        compile_ahead.main()
    assert note.exists() == noted
    assert lives == [compile_ahead._LONGEST_LIFE_S, compile_ahead._NICE]


def test_gradients_that_ranks_sum_in_32_bits_are_those_of_two_micro_batches() -> None:
    keys = ["model=gpt2", "parallel.micro_batch=4", "parallel.dp_replicate=2", "train.global_batch=8"]
    for more, samples in (([], 8), (["parallel.reduce=bf16"], 4), (["train.global_batch=32"], 8)):
        twin = twin_of(spec_of(*keys, *more))
        assert twin is not None
        assert (twin.train.global_batch, twin.parallel.world_size) == (samples, 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The requests for which a process would be started, on a machine with an H200."""
    requests: list[dict[str, Any]] = []
    monkeypatch.setattr(compile_ahead, "_started", requests.append)
    monkeypatch.setattr(compile_ahead, "gpu_of", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: H200.capability)
    monkeypatch.setattr(hopper, "_TRITON", "3.7.1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ARGOSY_KERNELS", raising=False)
    return requests


def begin(spec: RunSpec, device: torch.device = GPU) -> None:
    with compiling_ahead(spec, device):
        pass


def test_a_process_is_started_until_there_is_a_note_of_such_a_run(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["model=gpt2", "train.precision=bf16", *SMALL]
    begin(spec_of(*keys))
    Path(asked[0]["note"]).touch()
    # What does not change the kernels does not ask for them again.
    for same in (
        [], ["optim.lr=2e-3", "train.steps=20", "name=other"], ["parallel.dp_replicate=2", "train.global_batch=16"],
    ):  # fmt: skip
        begin(spec_of(*keys, *same))
    assert len(asked) == 1
    others = [
        "data.seq_len=512", "data.document_mask=true", "parallel.micro_batch=2", "parallel.recompute=full",
        "train.precision=fp8", "train.deterministic=false", "train.global_batch=4", "optim.name=lion", "model.layers=3", "guard=off",
    ]  # fmt: skip
    for other in others:
        begin(spec_of(*keys, other))
    monkeypatch.setattr(compile_ahead, "gpu_of", lambda device: Gpu((9, 0), 114))
    begin(spec_of(*keys))
    assert len({request["note"] for request in asked}) == len(asked) == 2 + len(others)
    assert asked[0]["gpu"] == [(9, 0), 132]
    assert RunSpec.model_validate(asked[0]["spec"]).train.global_batch == 8


@pytest.mark.parametrize(
    "keys",
    [
        ["parallel.tp=2"], ["parallel.pp=2"], ["parallel.cp=2"], ["parallel.compile=block"],
        ["model.positions=alibi"],  # by FlexAttention, which torch compiles
    ],
)  # fmt: skip
def test_none_is_started_for_what_it_could_not_see(keys: list[str], asked: list[dict[str, Any]]) -> None:
    begin(spec_of("model=gpt2", "train.precision=bf16", *SMALL, *keys))
    assert not asked


@pytest.mark.parametrize("variable", ["ARGOSY_COMPILE_AHEAD=off", "ARGOSY_KERNELS=torch"])
def test_it_can_be_turned_off(variable: str, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    begin(spec_of("model=gpt2", *SMALL), torch.device("cpu"))
    monkeypatch.setenv(*variable.split("="))
    begin(spec_of("model=gpt2", "train.precision=bf16", *SMALL))
    assert not asked


def test_one_process_of_a_machine_starts_it(asked: list[dict[str, Any]]) -> None:
    spec = spec_of("model=gpt2", "train.precision=bf16", *SMALL)
    for local_rank in (1, 7, 0):
        with run._compiling_ahead(spec, GPU, World(rank=local_rank, size=8, local_rank=local_rank)):
            pass
    assert len(asked) == 1


def test_it_runs_while_a_run_trains(write_spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = write_spec(), list[str]()
    resolved = resolve(path, ["train.steps=3", "log.every=1ba"])
    metrics = Path(resolved.spec.runs_dir) / resolved.spec.name / "metrics.jsonl"

    @contextmanager
    def beside(spec: RunSpec, device: torch.device, world: World) -> Iterator[None]:
        seen.append("before the first step" if not metrics.exists() else "later")
        yield
        seen.append("after the last one" if '"step":3' in metrics.read_text().replace(" ", "") else "earlier")

    monkeypatch.setattr(run, "_compiling_ahead", beside)
    assert run.train(resolved, path, run.TrainOptions(quiet=True)) == 0
    assert seen == ["before the first step", "after the last one"]


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], subprocess.Popen[bytes]]:
    """Start a process that reads its request and sleeps, in place of the one that compiles."""
    popen = subprocess.Popen
    asserts = "assert sys.stdin.read()[1:] == 'x' * 1_000_000 + chr(34) and not os.environ['CUDA_VISIBLE_DEVICES']"

    def start(seconds: float) -> subprocess.Popen[bytes]:
        def other(command: list[str], **options: Any) -> Any:
            assert command[1:] == ["-P", "-m", "argosy.train.compile_ahead"]
            return popen([sys.executable, "-c", f"import os, sys, time; {asserts}; time.sleep({seconds})"], **options)

        monkeypatch.setattr(compile_ahead.subprocess, "Popen", other)
        request: Any = "x" * 1_000_000
        return started(request)

    return start


def test_a_run_that_is_refused_leaves_no_process_behind(
    asked: list[dict[str, Any]], sleeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = sleeper(60.0)
    monkeypatch.setattr(compile_ahead, "_started", lambda request: process)
    spec = spec_of("model=gpt2", "train.precision=bf16", *SMALL)
    with pytest.raises(ValueError, match="refused"), compiling_ahead(spec, GPU):
        raise ValueError("refused")
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("where", "problem", "said"),
    [
        ("_started", BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "temporarily unavailable"),
        ("_request", PermissionError(errno.EACCES, "Permission denied"), "PermissionError"),
        ("_cache", RuntimeError("Could not determine home directory"), "home directory"),
    ],
)
def test_a_machine_that_cannot_start_it_trains_all_the_same(
    where: str,
    problem: Exception,
    said: str,
    asked: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*arguments: Any) -> None:
        raise problem

    monkeypatch.setattr(compile_ahead, where, fail)
    begin(spec_of("model=gpt2", "train.precision=bf16", *SMALL))
    assert "not compiled ahead of the first step: " in caplog.text
    assert said in caplog.text


def test_a_home_that_cannot_be_found_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert compile_ahead._cache() == Path("~/.triton/cache")

"""The kernels of a run's first steps, compiled in parallel by another process while this one opens data, draws weights and begins.

A kernel is otherwise compiled when it is first launched, one after the other. The other process takes two steps of the same model on the
meta device, which stands for the GPU: what they launch is what the run will launch, and Triton's cache on disk is where the run finds it.
It is started if that cache has no note of such a run. Nothing waits for it: the run compiles what it does not find, as it would have.

    python -m argosy.train.compile_ahead < request.json
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import orjson
import torch

from argosy import __version__
from argosy.compat import set_deterministic
from argosy.compat.kernel_compiler import compiling_only
from argosy.config.schema import ParallelSpec, RunSpec
from argosy.data.synthetic import synthetic_batch
from argosy.host_cores import available_cores
from argosy.model.ops.choice import Gpu, gpu_of, installed, meta_as, only_torch
from argosy.parallel.attention_cases import attention_backends
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import parallelize
from argosy.parallel.precision import choose_precision
from argosy.train.optimizer import Optimizer
from argosy.train.step import take_step

# "off": kernels are compiled as they are launched.
SWITCH = "ARGOSY_COMPILE_AHEAD"
# Seconds. A process whose run is gone ends by itself.
_LONGEST_LIFE_S = 180
_MOST_THREADS = 16
# The run, which begins meanwhile, comes first: it has the other half of the cores.
_NICE = 5
# Back ends of attention whose launches the meta device shows. The others are compiled by torch or by CuTe.
_SHOWN = {"hopper", "sdpa"}

_log = logging.getLogger("argosy")


@contextmanager
def compiling_ahead(spec: RunSpec, device: torch.device) -> Iterator[None]:
    """Run the other process if it is needed, until the end of the block at the latest."""
    process = None
    try:
        if (request := _request(spec, device)) is not None:
            process = _started(request)
    except Exception as problem:  # noqa: BLE001 - training does not depend on it
        _log.warning("kernels are not compiled ahead of the first step: %s: %s", type(problem).__name__, problem)
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _request(spec: RunSpec, device: torch.device) -> dict[str, Any] | None:
    """Return what the other process has to know; None if there is nothing for it to do."""
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get(SWITCH) == "off":
        return None
    twin, precision = twin_of(spec), choose_precision(spec.train.precision, device)
    if twin is None or only_torch() or installed("triton") is None:
        return None
    if not attention_backends(twin, precision, device) <= _SHOWN:
        return None
    gpu = gpu_of(device)
    note = _cache() / f"argosy-{_digest(twin, precision, gpu)}"
    if note.exists():
        return None
    return {"spec": twin.model_dump(mode="json"), "precision": precision, "gpu": [*gpu], "note": str(note)}


def _started(request: dict[str, Any]) -> subprocess.Popen[bytes]:
    # -P: what lies in this directory is not what the other process imports.
    command = [sys.executable, "-P", "-m", "argosy.train.compile_ahead"]
    # Not a pipe: one that is full would block until the other process has imported torch.
    with TemporaryFile() as file:
        file.write(orjson.dumps(request))
        file.seek(0)
        null, environment = subprocess.DEVNULL, os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(command, stdin=file, stdout=null, stderr=null, env=environment)


def twin_of(spec: RunSpec) -> RunSpec | None:
    """Return a run on one device whose passes launch the kernels of this run's; None where ranks share a pass or torch compiles it.

    With `dp_shard` its updates are by other kernels."""
    parallel = spec.parallel
    if max(parallel.tp, parallel.cp, parallel.pp, parallel.ep) > 1 or parallel.compile != "off":
        return None
    share = spec.train.global_batch // parallel.data_parallel
    # Gradients that several micro-batches or ranks sum have 32 bits, and other kernels.
    sums = share > parallel.micro_batch or (parallel.data_parallel > 1 and parallel.reduce == "fp32")
    samples = (1 + sums) * parallel.micro_batch
    alone = ParallelSpec(micro_batch=parallel.micro_batch, recompute=parallel.recompute)
    train = spec.train.model_copy(update={"global_batch": samples, "batch_rampup": None})
    return spec.model_copy(update={"parallel": alone, "train": train})


def compile_kernels(spec: RunSpec, precision: str, gpu: Gpu, threads: int) -> None:
    """Compile what two steps of a run on one device launch on a GPU, which need not be there."""
    set_deterministic(spec.train.deterministic)
    with compiling_only(gpu.capability, threads), meta_as(gpu):
        engine = parallelize(spec, Mesh(torch.device("meta")), precision=precision)
        optimizer = Optimizer(engine.model, spec.optim, scaled=precision == "fp16", guard=spec.guard)
        batch = synthetic_batch(spec)
        for step in (1, 2):
            take_step(engine, optimizer, batch, step=step, lr=1e-3)


def main() -> None:
    signal.alarm(_LONGEST_LIFE_S)
    os.nice(_NICE)
    request = orjson.loads(sys.stdin.buffer.read())
    (major, minor), processors = request["gpu"]
    spec, gpu = RunSpec.model_validate(request["spec"]), Gpu((major, minor), processors)
    try:
        compile_kernels(spec, request["precision"], gpu, min(_MOST_THREADS, max(1, available_cores() // 2)))
    except (OSError, MemoryError):
        raise
    except Exception:
        # A step that the meta device cannot take: it would fail the next time too.
        _write(Path(request["note"]))
        raise
    _write(Path(request["note"]))


def _write(note: Path) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    note.touch()


def _digest(twin: RunSpec, precision: str, gpu: Gpu) -> str:
    """Return a digest of what decides which kernels a run launches."""
    train, data = twin.train, twin.data
    facts = [
        twin.model.model_dump(mode="json"), twin.parallel.model_dump(mode="json"), twin.optim.name, twin.guard is None,
        data.seq_len, data.task, data.document_mask, train.global_batch, train.deterministic, train.z_loss,
        precision, *gpu, __version__, str(torch.__version__), installed("triton"),
    ]  # fmt: skip
    return hashlib.sha256(orjson.dumps(facts)).hexdigest()[:16]


def _cache() -> Path:
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))


if __name__ == "__main__":
    main()

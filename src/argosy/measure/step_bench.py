"""`argosy bench`: step time, tokens/s, MFU and memory of a model on this device, and how far the step is from its floor.

Model, engine and optimiser are those of a run, and the step is complete, with clipping and update. Only the data is
synthetic: random tokens, without data wait. The floor is the time of this step's own matmul and attention kernels, measured
in the same run, which no fusion can remove.
"""

from __future__ import annotations

import logging
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from argosy.config.counts import FLOPS_CONVENTION, count_parameters
from argosy.config.layout import check_world
from argosy.config.schema import RunSpec
from argosy.console.formats import digits
from argosy.console.progress_bar import ProgressBar
from argosy.data.open import open_data
from argosy.data.synthetic import synthetic_batch
from argosy.measure.device_clock import DeviceClock
from argosy.model.build import initial_weights
from argosy.model.ops.attention_backends import KERNELS
from argosy.parallel.engine import Engine
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import parallelize
from argosy.parallel.precision import choose_precision, slow_precision
from argosy.plan.hardware import Peak
from argosy.tasks.task_registry import run_flops_per_token
from argosy.train.device import Memory, measure_memory, peak_of, prepare_device, require_memory
from argosy.train.kernel_profile import StepProfile, kind_of, profile_step
from argosy.train.optimizer import Optimizer
from argosy.train.step import take_step

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bench:
    """The result of a benchmark. `tokens` are those of a step; `replayed`: the passes ran as a CUDA graph."""

    spec: RunSpec
    device: str
    precision: str
    steps_ms: list[float]
    tokens: int
    flops_per_token: float
    peak: Peak | None
    memory: Memory
    profile: StepProfile
    loss: float
    replayed: bool

    @property
    def step_ms(self) -> float:
        return statistics.median(self.steps_ms)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_ms * 1000

    @property
    def tflops(self) -> float:
        return self.tokens_per_s * self.flops_per_token / 1e12

    @property
    def mfu(self) -> float | None:
        return None if self.peak is None else self.tflops / self.peak.tflops

    @property
    def over_floor(self) -> float | None:
        return self.step_ms / self.profile.floor if self.profile.floor else None

    @property
    def attention(self) -> str:
        """The library whose attention kernels ran."""
        names = [name for name, _, _ in self.profile.kernels]
        return next((kernels.title() for kernels in KERNELS.values() if any(map(kernels.is_kernel, names))), "torch")

    def as_dict(self) -> dict[str, Any]:
        parameters = count_parameters(self.spec.model)
        return {
            "model": self.spec.model.preset or self.spec.model.family,
            "parameters": parameters.total,
            "active_parameters": parameters.active,
            "device": self.device,
            "torch": torch.__version__,
            "attention": self.attention,
            "precision": self.precision,
            "recompute": self.spec.parallel.recompute,
            "compile": self.spec.parallel.compile,
            "replayed": self.replayed,
            "batch": self.spec.train.global_batch,
            "micro_batch": self.spec.parallel.micro_batch,
            "seq_len": self.spec.data.seq_len,
            "step_ms": self.step_ms,
            "steps_ms": self.steps_ms,
            "tokens_per_s": self.tokens_per_s,
            "tflops": self.tflops,
            "flops": FLOPS_CONVENTION,
            "mfu": self.mfu,
            "peak": None if self.peak is None else f"{self.peak} dense 16-bit",
            "memory_gib": self.memory.as_dict(),
            "floor_ms": self.profile.floor,
            "over_floor": self.over_floor,
            "kinds_ms": self.profile.kinds,
            "kernels": [{"name": n, "ms": ms, "calls": calls} for n, ms, calls in self.profile.kernels[:20]],
            "host_waits": self.profile.host_waits,
            "loss": self.loss,
        }

    def lines(self) -> list[str]:
        spec, kinds = self.spec, self.profile.kinds
        layout = [self.precision, *(["repeatable arithmetic"] if spec.train.deterministic else [])]
        layout += [f"recompute {spec.parallel.recompute}"] if spec.parallel.recompute != "none" else []
        layout += [f"compile {spec.parallel.compile}"] if spec.parallel.compile != "off" else []
        layout += ["passes replayed as a CUDA graph"] if self.replayed else []
        parameters = count_parameters(spec.model)
        active = f" ({parameters.active:,} active)" if parameters.active != parameters.total else ""
        software = f"torch {torch.__version__}"
        software += f", attention by {self.attention}" if self.attention != "torch" else ""
        worst, best = max(self.steps_ms), min(self.steps_ms)
        utilisation = "n/a: no dense peak is known for this device"
        if self.mfu is not None:
            utilisation = f"{self.mfu:.1%} of {self.peak} TFLOP/s, dense 16-bit"
        return [
            f"{spec.model.preset or spec.model.family}, {parameters.total:,} parameters{active}, on {self.device}, {software}",
            f"{', '.join(layout)}; batch {spec.train.global_batch} x {spec.data.seq_len} tokens in micro-batches of "
            f"{spec.parallel.micro_batch}",
            "",
            f"step       {self.step_ms:,.1f} ms, the median of {len(self.steps_ms)} (best {best:,.1f}, worst {worst:,.1f})",
            f"tokens/s   {self.tokens_per_s:,.0f}",
            f"TFLOP/s    {digits(self.tflops)} ({FLOPS_CONVENTION})",
            f"MFU        {utilisation}",
            f"memory     {self.memory}",
            f"floor      {self.profile.floor:,.1f} ms: products {kinds['gemm']:,.1f}, attention {kinds['attention']:,.1f}, as "
            f"this step ran them; step / floor {self.over_floor or float('nan'):.2f}",
            f"the rest   {kinds['other']:,.1f} ms in other kernels, the longest: "
            + ", ".join(f"{short(n)} {ms:,.1f}" for n, ms in self._others(6)),
            f"waits      the host waited {self.profile.host_waits} times for the device within the step",
        ]

    def _others(self, count: int) -> list[tuple[str, float]]:
        return [(n, ms) for n, ms, _ in self.profile.kernels if kind_of(n) == "other"][:count]


def bench(spec: RunSpec, *, steps: int, warmup: int, trace: Path | None = None) -> Bench:
    device = prepare_device(spec.train)
    precision = choose_precision(spec.train.precision, device)
    if slow := slow_precision(spec.train.precision, device):
        _log.warning("%s", slow)
    engine, optimizer = start(spec, device)
    batch = engine.place(synthetic_batch(spec))
    done = 0

    def step() -> torch.Tensor:
        nonlocal done
        done += 1
        result = take_step(engine, optimizer, batch, step=done, lr=spec.optim.lr).result
        return result.loss_sum / result.tokens

    # Kernels are compiled during warm-up.
    with ProgressBar("warming up", warmup, " steps") as progress:
        for _ in range(warmup):
            loss = step()
            progress.advance(1)
    clock = DeviceClock(device)
    clock.mark("step")
    with ProgressBar("timing", steps, " steps") if device.type == "cpu" else nullcontext() as shown:
        for _ in range(steps):
            loss = step()
            clock.mark("step")
            # The host does not wait for a GPU, so the progress of its steps is not known.
            if shown is not None:
                shown.advance(1)
    accumulated = engine.accumulates(len(batch.tokens))
    return Bench(
        spec=spec,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        precision=precision,
        steps_ms=[ms for _, ms in clock.intervals_ms()],
        tokens=batch.read_tokens,
        flops_per_token=run_flops_per_token(spec),
        peak=peak_of(device),
        memory=measure_memory(engine.model, optimizer, device, accumulated=accumulated),
        profile=profile_step(step, device, trace),
        loss=float(loss),
        replayed=engine.uses_cuda_graph,
    )


def seconds_per_step(spec: RunSpec, steps: int) -> float:
    """Return the median seconds a step of a run takes on this machine, with its own data, over `steps` steps after one warm-up."""
    device = prepare_device(spec.train)
    stream = open_data(spec).training()
    engine, optimizer = start(spec, device)
    seconds = []
    for step in range(steps + 1):
        started = time.perf_counter()
        batch = stream.batch(0, spec.train.global_batch)
        float(take_step(engine, optimizer, batch, step=step + 1, lr=spec.optim.lr).grad_norm)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def start(spec: RunSpec, device: torch.device) -> tuple[Engine, Optimizer]:
    check_world(spec.parallel, 1, "a benchmark runs in one process")
    mesh = Mesh(device)
    require_memory(spec, device)
    engine = parallelize(spec, mesh)
    optimizer = Optimizer(engine.model, spec.optim)
    optimizer.set_weights(initial_weights(engine.model, spec.model, spec.train.seed))
    return engine, optimizer


def short(kernel: str) -> str:
    """Return the name of a kernel without its types and arguments."""
    name = kernel.split("(")[0].split("<")[0].removeprefix("void ")
    return name.split("::")[-1] or kernel[:40]

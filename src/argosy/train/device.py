"""The device of a run: its choice, its deterministic mode, the facts that its bits depend on, and its memory use.

A model whose weights, gradients and optimiser state exceed the device's memory is refused before it is built. On a CPU nothing
else would refuse it: the system overcommits memory until the kernel kills some process, not always this one.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from argosy.compat import set_deterministic
from argosy.config.counts import count_parameters, least_state_bytes
from argosy.config.schema import RunSpec, TrainSpec
from argosy.console.formats import digits
from argosy.errors import ArgosyError
from argosy.host_memory import available_memory
from argosy.model.ops import flash
from argosy.model.ops.choice import installed, only_torch
from argosy.parallel.precision import recorded_precision
from argosy.parallel.shards import local
from argosy.plan.hardware import Peak, dense_peak
from argosy.train.kernel_caches import own_kernel_caches
from argosy.train.optimizer import Optimizer

# Set in the environment of a test: ranks of one machine may outnumber its GPUs. They are slow, and share the memory of a GPU.
SHARE_GPUS = "ARGOSY_TEST_SHARED_GPUS"


def prepare_device(spec: TrainSpec, asked: str | None = None, *, local_rank: int | None = None) -> torch.device:
    """Return the device of the spec, or `asked` instead, in deterministic mode if the spec says so. Each local rank gets its own
    GPU."""
    name: str = asked or spec.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        known = "torch finds no usable GPU on this machine" if name == "cuda" else "the devices are auto, cpu and cuda"
        raise ArgosyError(
            "device.unavailable",
            f"the device {name!r} cannot be used: {known}",
            key="--device" if asked else "train.device",
            value=name,
            fix="use cpu, or check the driver with nvidia-smi",
        )
    if spec.deterministic:
        # cuBLAS reads this when it starts, which is later.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_deterministic(spec.deterministic)
    if name == "cuda":
        own_kernel_caches()
        if local_rank is not None:
            return _own_gpu(local_rank)
    return torch.device(name)


def _own_gpu(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if local_rank >= count and not os.environ.get(SHARE_GPUS):
        raise ArgosyError(
            "device.unavailable",
            f"rank {local_rank} of this machine has no GPU: there are {count}",
            key="--nproc",
            fix=f"start {count} ranks on this machine, or train.device=cpu",
        )
    if os.environ.get(SHARE_GPUS):
        # NCCL refuses two ranks of one host on one GPU. Ranks that claim different hosts talk over sockets.
        os.environ |= {"NCCL_HOSTID": f"argosy-{local_rank}", "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def name_of(device: torch.device) -> str | None:
    """Return the name of a GPU as its driver gives it; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def machine_facts(device: torch.device, precision: str) -> dict[str, str | int | None]:
    """Return the hardware, software and precision that compute here. If one of them differs, the last bits of every result may
    differ."""
    if device.type == "cuda":
        return {
            "torch": torch.__version__,
            "device": name_of(device),
            "precision": recorded_precision(precision, device),
            "cudnn": torch.backends.cudnn.version(),
            "triton": installed("triton"),
            "flash-attn-4": flash.INSTALLED,
            "kernels": "torch" if only_torch() else "auto",
        }
    kind = f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    return {
        "torch": torch.__version__,
        "device": kind,
        "precision": recorded_precision(precision, device),
        "threads": torch.get_num_threads(),
    }


def peak_of(device: torch.device) -> Peak | None:
    name = name_of(device)
    return None if name is None else dense_peak(name)


def memory_of(device: torch.device) -> float:
    """Return bytes of memory: the total of a GPU, or what is still available to a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return available_memory()


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@dataclass(frozen=True)
class Memory:
    """The peak memory and its parts, in GiB. `rest` is what the other parts leave: activations, logits, workspaces, and on a CPU the
    program itself."""

    peak: float
    parameters: float
    gradients: float
    optimiser: float

    @property
    def rest(self) -> float:
        return max(0.0, self.peak - self.parameters - self.gradients - self.optimiser)

    def __str__(self) -> str:
        unit, scale = ("GiB", 1) if self.peak >= 1 else ("MiB", 1024)
        peak, parameters, gradients, optimiser, rest = (
            digits(part * scale) for part in (self.peak, self.parameters, self.gradients, self.optimiser, self.rest)
        )
        return (
            f"{peak} {unit} at its peak: parameters {parameters}, gradients {gradients}, optimiser {optimiser}, "
            f"activations and the rest {rest}"
        )

    def as_dict(self) -> dict[str, float]:
        parts = {"parameters": self.parameters, "gradients": self.gradients, "optimiser": self.optimiser}
        return {key: round(value, 3) for key, value in ({"peak": self.peak} | parts | {"rest": self.rest}).items()}


def require_memory(spec: RunSpec, device: torch.device, *, ranks: int = 1) -> None:
    """Refuse a model whose weights, gradients and optimiser state, shared by the `ranks` of one replica, exceed the memory."""
    parameters, whole = count_parameters(spec.model).total, least_state_bytes(spec.model, spec.optim.rule)
    need, there = whole / ranks, memory_of(device)
    if need > there:
        among = "" if ranks == 1 else f" over {ranks} ranks"
        raise ArgosyError(
            "device.out-of-memory",
            f"{parameters:,} parameters x {whole / parameters:.3g} bytes (weights, gradients, optimiser){among} are {need / 2**30:,.1f} GiB, before any "
            f"activation, and {'this machine' if device.type == 'cpu' else 'the GPU'} has {there / 2**30:,.1f}",
            key="model",
            value=spec.model.preset or spec.model.family,
            fix="a smaller model, or more ranks to share it (parallel.dp_shard, tp, pp); `argosy plan` finds a layout, and "
            "`argosy train --dry-run --world-size N` checks one for other machines",
        )


def measure_memory(model: nn.Module, optimizer: Optimizer, device: torch.device, *, accumulated: bool) -> Memory:
    """Measure the memory by category. Call this after a step. `accumulated`: gradients are accumulated over micro-batches, in 32
    bits."""
    parameters = [local(p) for p in model.parameters()]
    trained = [local(p) for p in model.parameters() if p.requires_grad]
    # A 32-bit parameter is its own master weight.
    shared = {p.untyped_storage().data_ptr() for p in parameters}
    kept = [local(t) for t in (*optimizer.weights().values(), *optimizer.tensors().values())]
    return Memory(
        peak=peak_memory_gib(device),
        parameters=_gib(parameters),
        gradients=sum(p.numel() * (4 if accumulated else p.element_size()) for p in trained) / 2**30,
        optimiser=_gib(t for t in kept if t.untyped_storage().data_ptr() not in shared),
    )


def _gib(tensors: Iterable[Tensor]) -> float:
    return sum(t.numel() * t.element_size() for t in tensors) / 2**30

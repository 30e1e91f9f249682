"""The device a run trains on, the switches that make its arithmetic repeatable, and what its bits depend on besides."""

from __future__ import annotations

import os
import resource

import torch

from argosy.compat import set_deterministic
from argosy.config.schema import TrainSpec
from argosy.errors import ArgosyError
from argosy.host_memory import available_memory
from argosy.model.ops import flash
from argosy.model.ops.choice import installed, only_torch
from argosy.parallel.precision import recorded_precision
from argosy.plan.hardware import Peak, dense_peak


def prepare_device(spec: TrainSpec, asked: str | None = None, *, local_rank: int | None = None) -> torch.device:
    """The device of the spec, or the one `asked` for instead; of several ranks on a machine each gets a GPU of its own."""
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
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, which is later
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_deterministic(spec.deterministic)
    if name == "cuda" and local_rank is not None:
        return _own_gpu(local_rank)
    return torch.device(name)


def _own_gpu(local_rank: int) -> torch.device:
    if local_rank >= torch.cuda.device_count():
        raise ArgosyError(
            "device.unavailable",
            f"rank {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}",
            key="--nproc",
            fix=f"start {torch.cuda.device_count()} ranks on this machine, or train.device=cpu",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def name_of(device: torch.device) -> str | None:
    """A GPU's name, as its driver gives it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def machine_facts(device: torch.device, precision: str) -> dict[str, str | int | None]:
    """What computes here, and what `train.precision` became. Where one of these differs, so may the last bits of every number."""
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
    """Bytes: of the whole GPU; of a CPU's, what can still be taken."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return available_memory()


def peak_memory_gib(device: torch.device) -> float:
    """Most memory used so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

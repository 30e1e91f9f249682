"""A benchmark of causal attention, forward and backward, with every back end this machine has.

    python benchmarks/attention.py [--seconds 0.7] [--rounds 2] [--repeatable] [--documents 1000] [--shape 2 8192 32 8 128] [--smoke]

Every back end is timed where results must repeat bit for bit, and where they need not ("any order"). Prints milliseconds and TFLOP/s
(causal attention counted as half) at the clock the device can sustain, joules if the GPU counts them, and the relative error of outputs and
gradients of the first sample against plain fp32 attention with an explicit bias. Rounds are measured in turn, since a GPU at its power
limit may be slower after other work than after a pause. With `--documents`, samples are made of documents of so many tokens on average, which do not
see each other; TFLOP/s then count what plain causal attention computes. `--smoke` uses tiny shapes, for a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from argosy.compat import set_deterministic
from argosy.measure.calibrate import paced
from argosy.model.attention import BACKENDS, Backend, Case, Mask
from argosy.record.sensors import open_nvml

Shape = tuple[int, int, int, int, int]  # batch, tokens, heads, key/value heads, head_dim
SHAPES: list[Shape] = [(4, 8192, 32, 8, 64), (32, 1024, 20, 20, 64), (2, 8192, 32, 8, 128), (16, 2048, 16, 16, 128)]
# What tensor parallelism leaves of a model on one rank: llama3-70b over 8, llama3-8b over 4.
SHAPES += [(1, 4096, 8, 1, 128), (2, 4096, 8, 2, 128)]
TINY: list[Shape] = [(2, 256, 4, 2, 64)]
# Plain attention with an explicit bias.
EXACT = BACKENDS[-1]


def drawn(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return random queries, keys, values and output gradients, with the strides that a model's projections produce."""
    batch, seq, heads, kv_heads, width = shape
    parts = (torch.randn(batch, seq, n, width, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads, heads))
    return [part.transpose(1, 2) for part in parts]


def passes(backend: Backend, case: Case, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = backend.prepare(case, None)(*leaves)
    return [out, *torch.autograd.grad(out, leaves, d_out)]


def error(backend: Backend, case: Case, tensors: list[Tensor]) -> float:
    first = [t[:1] for t in tensors]
    documents = case.mask.documents
    case = case._replace(mask=replace(case.mask, documents=None if documents is None else documents[:1]))
    found = passes(backend, case, *first)
    exact = passes(EXACT, case._replace(dtype=torch.float32), *(t.float() for t in first))
    return max(float((a.float() - b).detach().norm() / b.detach().norm()) for a, b in zip(found, exact, strict=True))


class Cost(NamedTuple):
    """Seconds, and joules if they are counted, of a forward or a backward pass."""

    seconds: float
    joules: float | None

    def show(self, flops: float) -> str:
        energy = "" if self.joules is None else f", {self.joules:.2f} J"
        return f"{self.seconds * 1e3:.3f} ms ({flops / self.seconds / 1e12:.0f}{energy})"


def energy_counter(device: torch.device) -> Callable[[], float] | None:
    """Return the reader of the joules that a GPU has consumed, or None without such a counter."""
    found = open_nvml(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None
    if found is None:
        return None
    nvml, handle = found
    try:
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError:
        return None
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3


def timed(work: Callable[[], None], device: torch.device, seconds: float) -> Cost:
    """Return what one call of `work` costs: seconds from the second half of the time, joules from as long a time after it.

    Drivers update the counter of joules some 10 times a second: with less than a second it is coarse.
    """
    each = paced(work, device, seconds)
    counter = energy_counter(device)
    if counter is None:
        return Cost(each, None)
    count = max(2, round(seconds / 2 / each))
    before = counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize(device)
    return Cost(each, (counter() - before) / count)


def measure(backend: Backend, case: Case, tensors: list[Tensor], seconds: float) -> tuple[Cost, Cost]:
    """Measure the forward and the backward pass."""
    attend = backend.prepare(case, None)
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    out = attend(*leaves)

    def forwards() -> None:
        attend(*leaves)

    def backwards() -> None:
        torch.autograd.grad(out, leaves, tensors[3], retain_graph=True)

    return timed(forwards, case.device, seconds), timed(backwards, case.device, seconds)


def compare(shape: Shape, device: torch.device, options: argparse.Namespace) -> None:
    """Time every back end with one shape, and print what was found."""
    batch, seq, heads, kv_heads, width = shape
    parted = (
        None if options.documents is None else (torch.rand(batch, seq, device=device) < 1 / options.documents).cumsum(1)
    )
    case = Case(Mask(True, documents=parted), device, torch.bfloat16, width, seq, 0.0)
    tensors = drawn(shape, device, case.dtype)
    flops = 2 * batch * heads * seq * seq * width
    print(f"{batch} x {seq}, {heads} on {kv_heads} heads of {width}, on {device.type}")
    for number in range(options.rounds):
        for repeatable in (True,) if options.repeatable else (True, False):
            set_deterministic(repeatable)
            for backend in BACKENDS:
                order = "bits repeat" if repeatable else "any order"
                why = backend.refuses(case)
                if backend is EXACT and not options.smoke:
                    why = "left out: it needs memory for all scores at once"
                if why:
                    if number == 0:
                        print(f"  {backend.name:9} {order:11} {why}")
                    continue
                there, back = measure(backend, case, tensors, options.seconds)
                print(
                    f"  {backend.name:9} {order:11} {there.show(flops)} and {back.show(2.5 * flops)}, error {error(backend, case, tensors):.1e}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.7, help="length of a measurement; the second half counts")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each back end, in turn")
    parser.add_argument("--repeatable", action="store_true", help="only with deterministic kernels")
    parser.add_argument("--documents", type=int, metavar="TOKENS", help="the average length of documents")
    sizes = ("BATCH", "TOKENS", "HEADS", "KV_HEADS", "HEAD_DIM")
    parser.add_argument("--shape", type=int, nargs=5, action="append", metavar=sizes)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for shape in options.shape or (TINY if options.smoke else SHAPES):
        compare(shape, device, options)


if __name__ == "__main__":
    main()

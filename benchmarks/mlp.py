"""A benchmark of a gated MLP, matmul by matmul and with its activation beside the matmuls, where the machine has such kernels.

    python benchmarks/mlp.py [--seconds 0.7] [--rounds 2] [--shape 32768 2048 8192] [--smoke]

Prints milliseconds of the forward and of the backward pass without weight gradients, at the clock the device can sustain. Rounds are
measured in turn, since a GPU at its power limit may be slower after other work than after a pause. `--smoke` uses a tiny shape, for a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from argosy.measure.calibrate import paced
from argosy.model.layers import MLP

Shape = tuple[int, int, int]  # tokens, hidden and inner width
# llama3-1b with 4 samples, llama3-8b with 2.
SHAPES: list[Shape] = [(32768, 2048, 8192), (16384, 4096, 14336)]
TINY: list[Shape] = [(64, 64, 128)]


def passes(shape: Shape, device: torch.device, *, beside: bool) -> tuple[Callable[[], None], Callable[[], None]] | None:
    """Return the forward and the backward pass of an MLP, or None if this machine cannot compute it this way."""
    tokens, hidden, width = shape
    spec: Any = SimpleNamespace(hidden=hidden, ffn=width, activation="swiglu", gated=True, mlp_bias=False)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mlp = MLP(spec).to(device, dtype).requires_grad_(False)
    for weight in mlp.parameters():
        weight.normal_(std=hidden**-0.5)
    mlp.fuses_activation = beside
    x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    if beside and mlp._fused(x) is None:
        return None
    y, d_y = mlp(x), torch.randn_like(x)

    def forwards() -> None:
        mlp(x)

    def backwards() -> None:
        torch.autograd.grad(y, x, d_y, retain_graph=True)

    return forwards, backwards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.7, help="length of a measurement; the second half counts")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each form, in turn")
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("TOKENS", "HIDDEN", "WIDTH"))
    parser.add_argument("--smoke", action="store_true", help="a tiny shape")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for shape in options.shape or (TINY if options.smoke else SHAPES):
        print(f"{shape[0]} tokens, {shape[1]} to {shape[2]} and back, on {device.type}")
        forms = {name: passes(shape, device, beside=name == "beside") for name in ("apart", "beside")}
        for _ in range(options.rounds):
            for name, both in forms.items():
                if both is None:
                    print(f"  {name:7} no kernels for this machine and shape")
                    continue
                there, back = (paced(work, device, options.seconds) * 1e3 for work in both)
                print(f"  {name:7} {there:.3f} ms and {back:.3f} ms", flush=True)


if __name__ == "__main__":
    main()

"""A benchmark of initial weights: the time to draw a preset's, on this machine's cores.

    python benchmarks/initial_weights.py [PRESET …] [--rounds 2] [--shards 8] [--block NUMBERS] [KEY=VALUE …]

With `--shards`, the first of so many ranks draws, which keeps that part of each parameter's rows. A large parameter is drawn in blocks by
several threads; `--block` is the size of a block, and one larger than any parameter leaves each parameter whole, to one thread. Nothing
is copied to a model: a value is dropped when it is there.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from torch import Tensor

from argosy.config.resolve import resolve_model
from argosy.model import build

PRESETS = ["gpt2", "llama3-1b"]


def seconds(preset: str, keys: list[str], shards: int) -> tuple[float, int]:
    """Return the seconds to draw the parameters of a preset, and how many numbers these have."""
    spec = resolve_model(preset, keys)
    model = build.build_model(spec, "meta")

    def first_rows(parameter: Tensor) -> range:
        rows = -(-parameter.shape[0] // shards)
        return range(rows * parameter[0].numel())

    started = time.perf_counter()
    for _ in build.initial_weights(model, spec, 1, first_rows):
        pass
    return time.perf_counter() - started, sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="PRESET")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--block", type=int, default=build._BLOCK)
    options = parser.parse_args()
    keys = [word for word in options.presets if "=" in word]
    build._BLOCK = options.block
    for preset in [word for word in options.presets if "=" not in word] or PRESETS:
        for _ in range(options.rounds):
            took, numbers = seconds(preset, keys, options.shards)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(
                f"{preset}: {numbers / 1e6:,.0f} M numbers, {torch.get_num_threads()} threads, {options.shards} shards: {took:.2f} s, {peak:.1f} GB",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""A comparison of CUDA graph replay with kernels launched one by one: bit-equality, and step time. Needs a GPU.

    python benchmarks/replay.py [CASE …]

Each case trains 14 steps on four batches in turn, some of whose labels are ignored, twice from the same weights. Losses, gradient
norms and the final weights are compared bit for bit. `auto` replays only if the step is launch-bound.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
from torch import Tensor

from argosy.config.resolve import resolve
from argosy.data.samples.masks import IGNORED
from argosy.measure.step_bench import start, synthetic_batch
from argosy.train.device import prepare_device
from argosy.train.step import take_step

STEPS, WARM = 14, 6
COMMON = ["data.train=synthetic", "optim.lr=1e-3", "eval=off", f"train.steps={STEPS}", "model.dropout=0"]
SIZES = ["model.layers=4", "model.hidden=256", "model.heads=4", "model.vocab_size=1024", "data.seq_len=256"]
SMALL = ["model.family=llama", *SIZES, "train.global_batch=8", "parallel.micro_batch=8"]
MICROS = ["train.global_batch=16", "parallel.micro_batch=4"]
EXPERTS = "model.moe={experts: 8, top_k: 2, ffn: 256, router: sigmoid, bias_rate: 0.001, shared_experts: 1}"
GPT2 = ["model.vocab_size=50304", "data.seq_len=1024"]


def _gpt2(preset: str, batch: int) -> list[str]:
    return [f"model.preset={preset}", *GPT2, f"train.global_batch={batch}", f"parallel.micro_batch={batch}"]


CASES: dict[str, list[str]] = {
    "llama": SMALL,
    "micro-batches": [*SMALL, *MICROS],
    "gpt": [*SMALL, "model.family=gpt"],
    "ALiBi": [*SMALL, "model.family=mpt"],
    "window": [*SMALL, "model.window=64"],
    "qk-norm": [*SMALL, "model.qk_norm=true"],
    "experts": [*SMALL, EXPERTS, *MICROS],
    "bert": ["model.preset=bert-base", "data.seq_len=256", "train.global_batch=8"],
    "t5": ["model.preset=t5-small", "data.seq_len=256", "train.global_batch=8"],
    "fp32": [*SMALL, "train.precision=fp32"],
    "fp16": [*SMALL, "train.precision=fp16"],
    "fp8": [*SMALL, "train.precision=fp8"],
    "muon": [*SMALL, "optim.name=muon"],
    "z-loss": [*SMALL, "train.z_loss=1e-4"],
    "selective": [*SMALL, "parallel.recompute=selective"],
    "full": [*SMALL, "parallel.recompute=full"],
    "gpt2 4 x 1024": _gpt2("gpt2", 4),
    "gpt2 16 x 1024": _gpt2("gpt2", 16),
    "gpt2-large 8 x 1024": _gpt2("gpt2-large", 8),
    "gpt2-large 16 x 1024 full": [*_gpt2("gpt2-large", 16), "parallel.recompute=full"],
    "gpt2-large 32 x 1024": _gpt2("gpt2-large", 32),
}


class Trained(NamedTuple):
    """The result of a run. `numbers` are losses and gradient norms, step by step."""

    numbers: list[Tensor]
    weights: dict[str, Tensor]
    ms: float
    replayed: bool

    def equals(self, other: Trained) -> bool:
        pairs = [*zip(self.numbers, other.numbers, strict=True)]
        pairs += [(weight, other.weights[name]) for name, weight in self.weights.items()]
        return all(torch.equal(a, b) for a, b in pairs)


def train(keys: Sequence[str], graph: str) -> Trained:
    spec = resolve(None, [*COMMON, *keys, f"parallel.graph={graph}"]).spec
    engine, optimizer = start(spec, prepare_device(spec.train))
    made, draw = synthetic_batch(spec), np.random.default_rng(0)
    batches = []
    for turn in range(4):
        labels = np.where(draw.random(made.labels.shape) < 0.1 * turn, IGNORED, made.labels)
        batches.append(engine.place(replace(made, tokens=np.roll(made.tokens, turn, axis=1), labels=labels)))
    numbers, marks = [], [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for step in range(1, STEPS + 1):
        done = take_step(engine, optimizer, batches[step % 4], step=step, lr=1e-3)
        numbers += [done.result.loss_sum, done.grad_norm]
        marks[step].record()
    torch.cuda.synchronize()
    ms = statistics.median(before.elapsed_time(after) for before, after in list(pairwise(marks))[WARM:])
    weights = {name: weight.cpu() for name, weight in optimizer.weights().items()}
    return Trained(numbers, weights, ms, engine.uses_cuda_graph)


def main() -> None:
    print("| case | one by one | auto | replayed | bits |\n| --- | --- | --- | --- | --- |")
    for name in sys.argv[1:] or CASES:
        one_by_one, auto = train(CASES[name], "off"), train(CASES[name], "auto")
        bits = "equal" if one_by_one.equals(auto) else "DIFFERENT"
        replayed = "yes" if auto.replayed else "no"
        print(f"| {name} | {one_by_one.ms:.1f} ms | {auto.ms:.1f} ms | {replayed} | {bits} |", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

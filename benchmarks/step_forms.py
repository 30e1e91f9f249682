"""A benchmark of fused kernels inside whole training steps: a model's steps with and without them, in turn in one process.

    python benchmarks/step_forms.py [MODEL] [--batch 32] [--seq-len 1024] [--rounds 8] [--steps 7] [KEY=VALUE …]

A GPU at its power limit becomes slower as it warms up, by 2% in a minute, and machines of one kind differ by more. So kernels whose effect
is smaller than that are compared here: each round runs some steps of every form, and the first round is not counted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from argosy.config.benchmark import benchmark_spec
from argosy.data.synthetic import synthetic_batch
from argosy.measure.device_clock import DeviceClock
from argosy.measure.step_bench import start
from argosy.model.layers import MLP, Attention, AttentionBlock
from argosy.train.device import prepare_device
from argosy.train.step import take_step

# What is left to kernels of its own, by the attribute that lets matmul kernels do it.
FORMS: dict[str, dict[type[nn.Module], str]] = {
    "fused": {},
    "sums apart": {AttentionBlock: "fuses_sums"},
    "activation apart": {MLP: "fuses_activation"},
    "rope apart": {Attention: "fuses_rope"},
    "all apart": {AttentionBlock: "fuses_sums", MLP: "fuses_activation", Attention: "fuses_rope"},
}


@contextmanager
def apart(model: nn.Module, form: str) -> Iterator[None]:
    """Turn off what a form does without."""
    chosen = [
        (module, name) for kind, name in FORMS[form].items() for module in model.modules() if isinstance(module, kind)
    ]
    before = [getattr(module, name) for module, name in chosen]
    for module, name in chosen:
        setattr(module, name, False)
    try:
        yield
    finally:
        for (module, name), was in zip(chosen, before, strict=True):
            setattr(module, name, was)


def timed(step: Callable[[], object], steps: int, device: torch.device) -> list[float]:
    """Return the milliseconds of some steps. The first one, which may follow another form's, is not counted."""
    step()
    clock = DeviceClock(device)
    clock.mark("step")
    for _ in range(steps):
        step()
        clock.mark("step")
    return [ms for _, ms in clock.intervals_ms()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gpt2-large")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=7, help="of each form in a round")
    options, keys = parser.parse_known_args()
    keys = ["train.deterministic=true", "parallel.graph=off", *keys]
    spec = benchmark_spec(options.model, keys, steps=20, batch=options.batch, seq_len=options.seq_len)
    device = prepare_device(spec.train)
    engine, optimizer = start(spec, device)
    data = engine.place(synthetic_batch(spec))
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        take_step(engine, optimizer, data, step=done, lr=spec.optim.lr)

    found: dict[str, list[float]] = {form: [] for form in FORMS}
    for number in range(options.rounds):
        for form, all_ms in found.items():
            with apart(engine.model, form):
                ms = timed(step, options.steps, device)
            if number or options.rounds == 1:
                all_ms += ms
    for form, all_ms in found.items():
        print(
            f"{form:18}{statistics.mean(all_ms):9.2f} ms, median {statistics.median(all_ms):.2f}, {len(all_ms)} steps",
            flush=True,
        )


if __name__ == "__main__":
    main()

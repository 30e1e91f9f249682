"""A benchmark of fused kernels inside whole training steps: a model's steps with and without them, in turn in one process.

    python benchmarks/step_forms.py [MODEL] [--batch 32] [--seq-len 1024] [--rounds 8] [--steps 7] [KEY=VALUE …]

A GPU at its power limit becomes slower as it warms up, by 2% in a minute, and machines of one kind differ by more. So kernels whose effect
is smaller than that are compared here: each round runs some steps of every form, and the first round is not counted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import nn

from argosy.config.benchmark import benchmark_spec
from argosy.data.synthetic import synthetic_batch
from argosy.measure.device_clock import DeviceClock
from argosy.measure.step_bench import start
from argosy.model.layers import MLP, Attention, AttentionBlock
from argosy.model.ops import cross_entropy
from argosy.train.device import prepare_device
from argosy.train.step import take_step

# What matmul kernels do beside multiplying, by the attribute of a module that lets them. Logits have no attribute.
PARTS: dict[str, tuple[type[nn.Module], str]] = {
    "sums": (AttentionBlock, "fuses_sums"),
    "activation": (MLP, "fuses_activation"),
    "rope": (Attention, "fuses_rope"),
}
# What a form leaves to cuBLAS and to kernels of its own.
FORMS = {"fused": (), **{f"{part} apart": (part,) for part in (*PARTS, "logits")}, "all apart": (*PARTS, "logits")}


@contextmanager
def apart(model: nn.Module, form: str) -> Iterator[None]:
    """Turn off what a form does without."""
    with ExitStack() as changed:
        if "logits" in FORMS[form]:
            changed.enter_context(mock.patch.object(cross_entropy, "multiplies", return_value=False))
        for kind, name in (PARTS[part] for part in FORMS[form] if part in PARTS):
            for module in model.modules():
                if isinstance(module, kind):
                    changed.enter_context(mock.patch.object(module, name, False))
        yield


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

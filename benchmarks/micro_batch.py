"""A benchmark of the micro-batch that a run without the key gets: its step beside those of the other sizes that divide the batch.

    python benchmarks/micro_batch.py [WORK …] [--like H100] [--steps 8] [--sizes 5] [KEY=VALUE …]

The planner chooses the size as it does for `argosy train`, from what it knows of this machine's GPU. With `--like`, it takes the GPU for
another one, and no more than the memory of that one is given out: a run on an H200 then has the memory of an 80 GB GPU, but
its own speed. Each size gets an engine of its own, and the median of its steps counts. `--sizes` is the most sizes tried on each side of the chosen
one. The last column is how much slower the chosen size is than the fastest.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from argosy.config.batches import divisors
from argosy.config.default_micro_batch import with_micro_batch
from argosy.config.resolve import Resolved, resolve
from argosy.config.schema import RunSpec
from argosy.data.synthetic import synthetic_batch
from argosy.errors import ArgosyError
from argosy.measure.device_clock import DeviceClock
from argosy.model.build import fill_like_initial
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import parallelize
from argosy.plan.auto import cluster_of, settle_micro_batch
from argosy.plan.hardware import Cluster, parse_cluster
from argosy.train.device import name_of, prepare_device
from argosy.train.optimizer import Optimizer
from argosy.train.step import take_step

# Steps before those that are timed. A pass that is captured as a CUDA graph is captured in the third.
WARMUP = 4


@dataclass(frozen=True)
class Work:
    preset: str
    batch: int
    seq_len: int
    keys: tuple[str, ...] = ()


WORKS = {
    "gpt2": Work("gpt2", 64, 1024),
    "gpt2-large": Work("gpt2-large", 32, 1024),
    "llama3-1b": Work("llama3-1b", 4, 8192),
    "llama3-8b-shape": Work("llama3-8b", 2, 8192, ("model.layers=8",)),
    "mixture": Work("moe-3.5b-a1.1b", 8, 4096),
    # For a machine without a GPU, to try the benchmark itself.
    "smoke": Work("gpt2", 4, 32, ("model.layers=1", "model.hidden=32", "model.heads=2", "model.vocab_size=97")),
}


def resolved(work: Work, keys: list[str]) -> Resolved:
    """Return a run as a user writes it: a preset and what every run must have."""
    needed = ["data.train=synthetic", "optim.lr=1e-4", "eval=off", "train.steps=100", f"data.seq_len={work.seq_len}"]
    return resolve(
        None, [f"model.preset={work.preset}", f"train.global_batch={work.batch}", *needed, *work.keys, *keys]
    )


def sizes_around(chosen: int, batch: int, most: int) -> Iterator[int]:
    """Yield the chosen size, and up to `most` divisors of the batch below and above it, the nearest first."""
    sizes = divisors(batch, batch)
    place = sizes.index(chosen)
    yield chosen
    yield from reversed(sizes[max(0, place - most) : place])
    yield from sizes[place + 1 : place + 1 + most]


def step_ms(spec: RunSpec, device: torch.device, steps: int) -> float | None:
    """Return the median step of a run in milliseconds; None if it does not fit."""
    try:
        engine = parallelize(spec, Mesh(device))
        with torch.no_grad():
            for name, parameter in engine.model.named_parameters():
                fill_like_initial(name, parameter, spec.model)
        optimizer = Optimizer(engine.model, spec.optim)
        batch, clock = engine.place(synthetic_batch(spec)), DeviceClock(device)
        for number in range(1, WARMUP + steps + 1):
            take_step(engine, optimizer, batch, step=number, lr=spec.optim.lr)
            clock.mark("step")
        return statistics.median(ms for _, ms in clock.intervals_ms()[WARMUP - 1 :])
    except (torch.OutOfMemoryError, ArgosyError) as error:
        if isinstance(error, ArgosyError) and error.code != "device.out-of-memory":
            raise
        return None


def compare(
    work: Work, keys: list[str], cluster: Cluster | None, device: torch.device, options: argparse.Namespace
) -> str:
    """Time all sizes of a work, and return its row of the table."""
    settled = settle_micro_batch(resolved(work, keys), cluster, None).spec
    chosen = settled.parallel.micro_batch
    found: dict[int, float] = {}
    told = []
    for size in sizes_around(chosen, work.batch, options.sizes):
        ms = step_ms(with_micro_batch(settled, size), device, options.steps)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        told.append(f"{size}: {'does not fit' if ms is None else f'{ms:.1f}'}")
        if ms is not None:
            found[size] = ms
    behind = f"{found[chosen] / min(found.values()) - 1:.1%}" if chosen in found else "does not fit"
    return f"| {work.preset}, {work.batch} x {work.seq_len} | {chosen} | {', '.join(told)} | {behind} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", metavar="WORK", help=", ".join(WORKS))
    parser.add_argument("--like", metavar="GPU", help="plan for this GPU, and give out no more memory than it has")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sizes", type=int, default=3, help="sizes tried on each side of the chosen one")
    options, keys = parser.parse_known_args()
    # Overrides of the run spec, which are no works.
    keys += [word for word in options.works if "=" in word]
    names = [word for word in options.works if "=" not in word] or [name for name in WORKS if name != "smoke"]
    if unknown := [name for name in names if name not in WORKS]:
        parser.error(f"{', '.join(unknown)}: works are {', '.join(WORKS)}")
    device = prepare_device(resolved(WORKS[names[0]], keys).spec.train)
    like = parse_cluster(f"1x{options.like}") if options.like else None
    if like is not None and device.type == "cuda":
        device = torch.device(device.type, torch.cuda.current_device())
        whole = torch.cuda.get_device_properties(device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, like.gpu.memory / whole), device)
    print("| work | chosen | micro-batch: step in ms | slower than the fastest |\n| --- | --- | --- | --- |")
    for name in names:
        cluster = like or cluster_of(resolved(WORKS[name], keys).spec, name_of(device), 1)
        print(compare(WORKS[name], keys, cluster, device, options), flush=True)


if __name__ == "__main__":
    main()

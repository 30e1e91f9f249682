"""A benchmark of compiling a run's kernels ahead of its first step, for a GPU that need not be there.

    python benchmarks/compile_ahead.py [--threads 1 2] [--capability 9 0] [--processors 132] [KEY=VALUE …]

Each number of threads starts with an empty cache. The last row is what the steps on the meta device take when everything is compiled.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from argosy.config.resolve import resolve
from argosy.model.ops.choice import Gpu
from argosy.train.compile_ahead import compile_kernels, twin_of

DEFAULT = ["model=llama3-1b", "data.seq_len=8192", "train.global_batch=4", "parallel.micro_batch=4"]
NEEDED = ["data.train=synthetic", "train.steps=9", "optim.lr=1e-4", "eval=off"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--capability", type=int, nargs=2, default=[9, 0])
    parser.add_argument("--processors", type=int, default=132)
    options, keys = parser.parse_known_args()
    major, minor = options.capability
    gpu = Gpu((major, minor), options.processors)
    twin = twin_of(resolve(None, [*NEEDED, *(keys or DEFAULT)]).spec)
    if twin is None:
        raise SystemExit("only for layouts of one GPU, dp_replicate and dp_shard, without compile")
    precision = "bf16" if twin.train.precision == "auto" else twin.train.precision

    def timed(threads: int, cache: str) -> None:
        started = time.perf_counter()
        compile_kernels(twin, precision, gpu, threads)
        kernels = len(list(Path(cache).glob("*/*.cubin")))
        print(f"{threads:3} threads{time.perf_counter() - started:8.1f} s, {kernels} kernels", flush=True)

    for threads in options.threads:
        with tempfile.TemporaryDirectory() as cache:
            # In a process of its own: Triton also keeps kernels in memory.
            if (child := os.fork()) == 0:
                os.environ["TRITON_CACHE_DIR"] = cache
                timed(threads, cache)
                os._exit(0)
            os.waitpid(child, 0)
            if threads == options.threads[-1]:
                os.environ["TRITON_CACHE_DIR"] = cache
                timed(threads, cache)


if __name__ == "__main__":
    main()

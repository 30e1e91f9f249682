"""The benchmark of compiling ahead compiles into an empty cache for each number of threads, and once more into a full one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from benchmarks import compile_ahead

from argosy.config.schema import RunSpec
from argosy.model.ops.choice import Gpu


def test_each_number_of_threads_starts_with_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def compile_kernels(spec: RunSpec, precision: str, gpu: Gpu, threads: int) -> None:
        cache = Path(os.environ["TRITON_CACHE_DIR"])
        print(
            len(list(cache.iterdir())),
            spec.data.seq_len,
            precision,
            *gpu.capability,
            gpu.processors,
            threads,
            flush=True,
        )
        (cache / "kernel").mkdir(exist_ok=True)
        (cache / "kernel" / "one.cubin").touch()

    monkeypatch.setattr(compile_ahead, "compile_kernels", compile_kernels)
    monkeypatch.setenv("TRITON_CACHE_DIR", "restored at the end of the test")
    keys = ["model=gpt2", "data.seq_len=64", "train.global_batch=8", "parallel.micro_batch=4"]
    words = ["--threads", "1", "3", "--capability", "8", "0", "--processors", "108", *keys]
    monkeypatch.setattr(sys, "argv", ["compile_ahead.py", *words])
    compile_ahead.main()
    lines = capfd.readouterr().out.splitlines()
    assert lines[::2] == ["0 64 bf16 8 0 108 1", "0 64 bf16 8 0 108 3", "1 64 bf16 8 0 108 3"]
    assert all(line.endswith("1 kernels") for line in lines[1::2])

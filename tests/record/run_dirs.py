"""Run directories with the files that a trainer would have written, made without training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from argosy.config.resolve import resolve
from argosy.record.jsonl import JsonlWriter
from argosy.record.rundir import RunDir

BASE = ("model=gpt2", "data.train=corpus", "train.global_batch=8", "train.steps=1000", "optim.lr=1e-3")


def make_run(root: Path, *overrides: str) -> RunDir:
    """Make a run directory with a spec. The run is named after the last part of `root`."""
    run = RunDir(root)
    root.mkdir(parents=True)
    run.store(resolve(None, [*BASE, f"name={root.name}", *overrides]), None, {}, {})
    return run


def record(step: int, **more: Any) -> dict[str, Any]:
    spent = {"productive": 9.0 * step, "data": 0.4 * step, "evaluation": 0.1 * step, "save": 0.2 * step, "startup": 5.0, "lost": 0.0, "down": 0.0}  # fmt: skip
    return {
        "step": step, "steps": 1000, "time": 1_700_000_000.0 + 10 * step, "loss": 8.0 * step**-0.2, "grad_norm": 1.0,
        "lr": 1e-3, "samples": 8 * step, "tokens": 8192 * step, "tokens_per_s": 800.0, "tokens_per_s_gpu": 800.0, "tflops": 1.5,
        "mfu": None, "peak": None, "step_s": 10.0, "data_wait": 0.04, "memory_gib": 3.0, "eta_s": 10.0 * (1000 - step),
        "time/data": 0.4, "time/forward_backward": 8.0, "time/optimizer": 1.0, "goodput": 0.9, "spent": spent,
    } | more  # fmt: skip


def log(run: RunDir, steps: Iterable[int], **more: Any) -> None:
    with JsonlWriter(run.metrics) as metrics:
        for step in steps:
            metrics.write(record(step, **more))

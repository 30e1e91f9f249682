"""A run that is cut and resumed, beside one that is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from argosy.config.resolve import resolve
from argosy.record.jsonl import read_metrics
from argosy.train.run import TrainOptions, train


def require_bit_equal_resume(
    write_spec: Callable[..., Path], runs: Path, optim: dict[str, object], precision: str
) -> None:
    """Six steps that learn have the same losses, gradient norms and checkpoint with a stop after three of them."""
    path = write_spec(optim=optim)
    # A CPU without instructions for bf16 is slow at it: few tokens.
    keys = [f"train.precision={precision}", "data.seq_len=16", "eval=off"]
    for name, lengths in (("whole", [6]), ("cut", [3, 6])):
        for steps in lengths:
            overrides = [f"name={name}", f"train.steps={steps}", *keys]
            assert train(resolve(path, overrides), path, TrainOptions(quiet=True)) == 0
    whole, cut = (read_metrics(runs / name / "metrics.jsonl") for name in ("whole", "cut"))
    assert [(r["loss"], r["grad_norm"]) for r in whole.values()] == [(r["loss"], r["grad_norm"]) for r in cut.values()]
    assert whole[6]["loss"] < whole[1]["loss"]
    for file in ("optimizer.safetensors", "weights.safetensors"):
        one, other = (runs / name / "checkpoints" / "step-00000006" / file for name in ("whole", "cut"))
        assert one.read_bytes() == other.read_bytes()

"""A mixture of experts in training: its biases move once a step, are saved and restored, and its load is on the record."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from argosy.checkpoint.store import latest
from argosy.config.resolve import resolve, resolve_model
from argosy.config.schema import OptimSpec
from argosy.data.samples.windows import Batch
from argosy.errors import EXIT_DONE
from argosy.model.build import build_model, initial_weights
from argosy.model.moe import describe_load
from argosy.parallel.precision import apply_precision
from argosy.parallel.single import SingleDevice
from argosy.parallel.transformer_blocks import DropoutSeeds
from argosy.record.jsonl import read_metrics
from argosy.train.optimizer import Optimizer
from argosy.train.run import TrainOptions, train

Write = Callable[..., Path]
RATE = 2.0**-10
MODEL = {
    "preset": "deepseek-moe-16b", "layers": 3, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 48, "vocab_size": 257,
    "max_seq_len": 64,
    "moe": {"experts": 8, "top_k": 3, "ffn": 16, "shared_experts": 1, "router": "sigmoid", "bias_rate": RATE, "z_loss": 1e-3},
}  # fmt: skip


def go(path: Path, *overrides: str) -> None:
    assert train(resolve(path, overrides), path, TrainOptions(quiet=True)) == EXIT_DONE


def weights(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = latest(run / "checkpoints", report=print)
    assert checkpoint is not None
    return checkpoint.weights()


def outcome(run: Path) -> tuple[dict[int, tuple[float, ...]], str]:
    keys = ("loss", "grad_norm", "balance_loss", "router_z", "max_load", "effective_experts", "idle_experts")
    metrics = {step: tuple(r[key] for key in keys) for step, r in read_metrics(run / "metrics.jsonl").items()}
    files = sorted((run / "checkpoints" / "step-00000008").glob("*.safetensors"))
    return metrics, hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_has_the_same_biases_loads_and_losses_bit_for_bit(
    write_spec: Write, tmp_path: Path, precision: str
) -> None:
    path = write_spec(
        model=MODEL, train={"global_batch": 4, "steps": 8, "precision": precision}, parallel={"micro_batch": 2},
        checkpoint={"every": 4},
    )  # fmt: skip
    keys = ("data.seq_len=16", "eval.batches=1")
    go(path, *keys)
    run = tmp_path / "runs" / "tiny"
    expected = outcome(run)
    biases = {name: w for name, w in weights(run).items() if name.endswith("router.bias")}
    assert set(biases) == {"layers.1.mlp.router.bias", "layers.2.mlp.router.bias"}
    for bias in biases.values():
        assert bias.dtype == torch.float32
        moves = bias / RATE
        assert torch.equal(moves, moves.round())  # a whole number of steps, so nothing was rounded on the way
        assert 1 <= float(moves.abs().max()) <= 8
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    go(path, *keys)
    assert outcome(run) == expected


def test_parameters_without_gradients_are_kept_but_neither_trained_nor_rounded() -> None:
    spec = resolve_model("deepseek-moe-16b", [f"{k}={v}" for k, v in MODEL.items() if k not in ("preset", "moe")])
    spec = spec.model_copy(update={"moe": spec.moe.model_copy(update={"bias_rate": 0.1})})  # type: ignore[union-attr]
    model = build_model(spec)
    apply_precision(model, "bf16")
    optimizer = Optimizer(model, OptimSpec.model_validate({"lr": 0.01, "min_lr": 0.001, "weight_decay": 0.1}))
    optimizer.set_weights(initial_weights(model, spec, seed=1))
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    value = torch.full((64,), 1.0 + 2.0**-20)
    for parameter in frozen.values():
        parameter.copy_(value)
    engine = SingleDevice(model, DropoutSeeds(model, seed=1), micro_batch=2, device=torch.device("cpu"))
    tokens, labels = np.random.default_rng(0).integers(0, 257, (2, 4, 16))
    result = engine.forward_backward(Batch(tokens, labels), step=1)
    optimizer.step(tokens=result.tokens, lr=0.01)
    assert optimizer.weights().keys() == dict(model.named_parameters()).keys()
    assert not any("router.bias" in name for name in optimizer.tensors())
    assert all(torch.equal(optimizer.weights()[name], value) for name in frozen)
    assert result.expert_load is not None
    assert result.expert_load.sum(-1).tolist() == [4 * 16 * 6] * 2  # every token, six experts, both layers


def test_the_record_describes_the_load() -> None:
    level = describe_load(torch.full((3, 8), 50))
    assert level == pytest.approx({"max_load": 1.0, "effective_experts": 8.0, "idle_experts": 0})
    lopsided = describe_load(torch.tensor([[40, 0, 0, 0], [10, 10, 10, 10]]))
    assert lopsided == pytest.approx({"max_load": 4.0, "effective_experts": 2.5, "idle_experts": 3})

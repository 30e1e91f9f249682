"""fp16's loss scale: lowered by overflow, raised by good steps, saved with the run; a skipped step changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from argosy.config.resolve import resolve, resolve_model
from argosy.config.schema import OptimSpec
from argosy.console.training_lines import describe
from argosy.data.samples.windows import Batch
from argosy.errors import ArgosyError
from argosy.model.build import build_model, initial_weights
from argosy.model.ops.choice import kernels
from argosy.parallel.precision import apply_precision
from argosy.parallel.single import SingleDevice
from argosy.parallel.transformer_blocks import DropoutSeeds
from argosy.record.jsonl import read_metrics
from argosy.train import guard as module
from argosy.train.guard import HYSTERESIS, INITIAL, INTERVAL, MINIMUM, LossScaler
from argosy.train.optimizer import Optimizer
from argosy.train.rewind import require_finite
from argosy.train.run import TrainOptions, train

Write = Callable[..., Path]
CPU = torch.device("cpu")
SPEC = resolve_model("gpt2", ["layers=2", "hidden=32", "heads=2", "vocab_size=64", "max_seq_len=16"])


def fp16(**changes: object) -> tuple[nn.Module, Optimizer]:
    built = build_model(SPEC)
    apply_precision(built, "fp16")
    optimizer = Optimizer(built, OptimSpec.model_validate({"lr": 0.01, "min_lr": 0.001} | changes))
    optimizer.set_weights(initial_weights(built, SPEC, 1))
    return built, optimizer


def batch() -> Batch:
    tokens, labels = np.random.default_rng(0).integers(0, 64, (2, 8, 16))
    return Batch(tokens, labels)


def reference(overflows: list[bool]) -> list[float]:
    """The scale after each step, in plain Python."""
    scale, good, patience, found = INITIAL, 0, HYSTERESIS, []
    for overflow in overflows:
        if overflow:
            good, patience = 0, patience - 1
            if patience <= 0:
                scale /= 2
        else:
            good += 1
            if good == INTERVAL:
                scale, good, patience = scale * 2, 0, HYSTERESIS
        found.append(scale)
    return found


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3, 1.0])
def test_the_scale_follows_overflows_with_hysteresis(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (module.__name__ + ".INTERVAL", __name__ + ".INTERVAL"):
        monkeypatch.setattr(name, 20)
    rng = np.random.default_rng(1)
    overflows = (rng.random(100) < rate).tolist()
    scaler = LossScaler(CPU)
    found = []
    for number, overflow in enumerate(overflows):
        if number == 50:  # saved and loaded in the middle
            numbers, scaler = scaler.numbers(), LossScaler(CPU)
            scaler.load(numbers)
        scaler.update(torch.tensor(float(overflow)))
        found.append(float(scaler.scale))
    assert found == reference(overflows)


def test_scaled_gradients_give_the_update_of_32_bits_but_for_rounding() -> None:
    norms = []
    for precision in ("fp32", "fp16"):
        built = build_model(SPEC)
        apply_precision(built, precision)
        optimizer = Optimizer(built, OptimSpec.model_validate({"lr": 0.01, "min_lr": 0.001}))
        optimizer.set_weights(initial_weights(built, SPEC, 1))
        scale = optimizer.loss_scale(8 * 16)
        engine = SingleDevice(built, DropoutSeeds(built, seed=1), micro_batch=4, device=CPU)
        result = engine.forward_backward(batch(), 1, scale)
        norms.append(float(optimizer.step(tokens=result.tokens, lr=0.01, loss_scale=scale)))
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


@pytest.mark.parametrize("form", [False, True])
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_a_step_that_overflows_changes_nothing_but_the_count(poison: float, form: bool) -> None:
    built, optimizer = fp16()
    for parameter in built.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(tokens=1, lr=0.01)
    before = {name: t.clone() for name, t in (optimizer.weights() | optimizer.tensors()).items()}
    parameters = [p.detach().clone() for p in built.parameters()]
    for parameter in built.parameters():
        parameter.grad = torch.ones_like(parameter)
    next(built.parameters()).grad[0, 0] = poison  # type: ignore[index]
    with kernels(form):
        optimizer.step(tokens=1, lr=0.01)
    after = optimizer.weights() | optimizer.tensors()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), parameters, strict=True))
    assert optimizer.report() == {"loss_scale": INITIAL, "skipped": 1}
    assert optimizer.numbers()["updates"] == 1


def test_an_overflow_in_training_is_skipped_counted_and_shown(write_spec: Write, tmp_path: Path) -> None:
    # Few tokens: a CPU that has found out that it has no bf16 is slow at fp16 too.
    path = write_spec(train={"global_batch": 4, "steps": 60, "precision": "fp16"}, eval="off", checkpoint={"every": 60})
    trainer_scale = 2.0**40  # too large: overflows until it has come down

    original = LossScaler.__init__

    def start_high(self: LossScaler, device: torch.device) -> None:
        original(self, device)
        self.scale.fill_(trainer_scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossScaler, "__init__", start_high)
        assert train(resolve(path, ["data.seq_len=16"]), path, TrainOptions(quiet=True)) == 0
    metrics = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert metrics[1]["skipped"] == 1
    assert metrics[1]["grad_norm"] is None
    assert "skipped" in describe(metrics[60])
    assert 1 < metrics[60]["skipped"] < 40
    assert metrics[60]["loss_scale"] < trainer_scale
    assert metrics[60]["loss"] < metrics[1]["loss"]


def test_a_run_that_is_rewound_to_its_start_has_its_first_scale_again() -> None:
    built, optimizer = fp16()
    for _ in range(40):
        for parameter in built.parameters():
            parameter.grad = torch.full_like(parameter, float("inf"))
        optimizer.step(tokens=1, lr=0.01)
    assert optimizer.report()["loss_scale"] < MINIMUM
    optimizer.reset()
    assert optimizer.numbers() == fp16()[1].numbers()


def test_overflow_that_no_scale_cures_is_refused_with_the_weights_unharmed(write_spec: Write) -> None:
    spec = resolve(write_spec(train={"global_batch": 8, "steps": 8, "precision": "fp16"})).spec
    record = {"step": 3, "loss": float("nan"), "grad_norm": float("nan"), "skipped": 17, "loss_scale": MINIMUM}
    require_finite(record, spec)
    with pytest.raises(ArgosyError, match="17 steps were skipped") as refusal:
        require_finite(record | {"loss_scale": MINIMUM / 2}, spec)
    assert "bf16" in refusal.value.fix

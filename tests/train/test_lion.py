"""Lion: the paper's formula for every parameter, whatever the precision, and the same bits after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from argosy.config.optimizers.lion import LionSpec
from argosy.config.resolve import resolve, resolve_model
from argosy.config.schema import OptimSpec
from argosy.errors import ArgosyError
from argosy.model.build import build_model, initial_weights
from argosy.model.ops.choice import kernels
from argosy.parallel.precision import apply_precision
from argosy.train import lion_update
from argosy.train.optimizer import Optimizer
from argosy.train.slots import Slot, Update
from train.cut_runs import require_bit_equal_resume

Write = Callable[..., Path]
LLAMA = resolve_model("llama3-8b", ["layers=2", "hidden=32", "heads=4", "kv_heads=2", "ffn=64", "vocab_size=64"])
LION = OptimSpec.model_validate({"name": "lion", "lr": 1e-3, "min_lr": 1e-4})
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(16, 12), (5,), (3, 4, 5), (0, 4), (33,)]
STEPS = 4


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def by_the_paper(betas: tuple[float, float], lr: float, decay: float) -> list[Tensor]:
    """Algorithm 2 of arXiv 2302.06675, in 64 bits."""
    weights = [weight.double() for weight in drawn(0)]
    momenta = [torch.zeros_like(weight) for weight in weights]
    for step in range(1, STEPS + 1):
        for index, gradient in enumerate(drawn(step)):
            interpolated = betas[0] * momenta[index] + (1 - betas[0]) * gradient
            weights[index] = weights[index] - lr * (torch.sign(interpolated) + decay * weights[index])
            momenta[index] = betas[1] * momenta[index] + (1 - betas[1]) * gradient
    return weights


def updated(betas: tuple[float, float], lr: float, decay: float) -> list[Tensor]:
    slots = []
    for index, weight in enumerate(drawn(0)):
        parameter = nn.Parameter(weight.to(DEVICE))
        slots.append(Slot(str(index), parameter, parameter.detach(), {"exp_avg": torch.zeros_like(parameter)}))
    apply = lion_update.make_update(LionSpec(betas=betas), nn.Module())
    for step in range(1, STEPS + 1):
        update = Update(lr, *torch.tensor([0.5, 0.0, float(step)], device=DEVICE).unbind())
        with torch.no_grad():
            apply(slots, [2 * gradient.to(DEVICE) for gradient in drawn(step)], update, decay)
    return [slot.master for slot in slots]


@pytest.mark.parametrize("form", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.3, 0.4)])
def test_weights_are_the_papers(form: bool, betas: tuple[float, float]) -> None:
    if form:
        pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")
    with kernels(form):
        weights = updated(betas, 0.01, 0.1)
    for found, expected in zip(weights, by_the_paper(betas, 0.01, 0.1), strict=True):
        torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", [False, True], ids=["torch", "kernel"])
def test_a_gradient_that_is_no_number_is_seen_in_the_weights(form: bool) -> None:
    if form:
        pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")
    parameter = nn.Parameter(torch.ones(3, device=DEVICE))
    slot = Slot("w", parameter, parameter.detach(), {"exp_avg": torch.zeros(3, device=DEVICE)})
    gradient = torch.tensor([1.0, float("nan"), 0.0], device=DEVICE)
    update = Update(0.5, *torch.tensor([1.0, 0.0, 1.0], device=DEVICE).unbind())
    with torch.no_grad(), kernels(form):
        lion_update.make_update(LionSpec(), nn.Module())([slot], [gradient], update, 0.0)
    assert parameter.tolist() == pytest.approx([0.5, float("nan"), 1.0], nan_ok=True)


def test_every_parameter_is_lions_and_has_one_tensor_of_state() -> None:
    built = build_model(LLAMA)
    assert Optimizer(built, LION).tensors().keys() == {f"exp_avg/{name}" for name, _ in built.named_parameters()}


@pytest.mark.parametrize("form", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_skipped_or_low_precision_step_keeps_master_and_parameter_in_step(precision: str, form: bool) -> None:
    if form:
        pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")
    built = build_model(LLAMA)
    apply_precision(built, precision)
    optimizer = Optimizer(built, LION, scaled=True)
    optimizer.set_weights(initial_weights(built, LLAMA, 1))
    for poison in (0.0, float("inf"), float("nan")):
        before = {name: t.clone() for name, t in (optimizer.weights() | optimizer.tensors()).items()}
        for parameter in built.parameters():
            parameter.grad = torch.randn_like(parameter) + poison
        with kernels(form):
            optimizer.step(tokens=1, lr=0.01)
        same = [torch.equal(t, before[name]) for name, t in (optimizer.weights() | optimizer.tensors()).items()]
        assert all(same) if poison else not any(same)
        for name, parameter in built.named_parameters():
            rounded = optimizer.weights()[name].to(parameter.dtype)
            # The interpreter cuts bits off where the hardware rounds.
            torch.testing.assert_close(parameter.detach(), rounded, rtol=2**-7 if form else 0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_is_bit_equal(write_spec: Write, tmp_path: Path, precision: str) -> None:
    require_bit_equal_resume(
        write_spec, tmp_path / "runs", {"name": "lion", "lr": 3e-3, "schedule": "constant"}, precision
    )


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["optim.lion={betas: [0.9, 0.98]}"], "optim.lion", "optim.name=lion"),
        (["optim.name=lion", "optim.betas=[0.9, 0.98]"], "optim.betas", "write it as optim.lion.betas"),
        (["optim.name=lion", "optim.eps=1e-6"], "optim.eps", "leave it out"),
        (["optim.name=lion", "optim.lion.betas=[0.9, 1.5]"], "optim.lion.betas.1", ""),
    ],
)
def test_keys_another_optimiser_reads_are_refused(overrides: list[str], key: str, fix: str, write_spec: Write) -> None:
    with pytest.raises(ArgosyError) as refusal:
        resolve(write_spec(), overrides)
    assert refusal.value.key == key
    assert fix in (refusal.value.fix or "")

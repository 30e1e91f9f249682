"""Products of 8-bit floats: how far they may be from exact ones, and that their scales carry any magnitude."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from argosy.model.ops import fp8
from argosy.model.ops.fp8 import FORWARD, GRADIENT, fp8_matmuls, quantise


def _far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e12])
def test_a_product_is_within_the_rounding_of_its_factors_at_any_magnitude(magnitude: float) -> None:
    torch.manual_seed(1)
    x = (magnitude * torch.randn(3, 32, 64)).requires_grad_()
    weight, bias = torch.randn(48, 64, requires_grad=True), (magnitude * torch.randn(48)).requires_grad_()
    d_y = torch.randn(3, 32, 48) / magnitude
    (y,) = fp8_matmuls(x, [weight], [bias])
    y.backward(d_y)
    exact = x.detach() @ weight.detach().t() + bias.detach()
    assert _far(y.detach(), exact) < 0.05  # two factors of 3 bits each
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    assert _far(x.grad, d_y @ weight.detach()) < 0.09  # one factor of 2 bits
    assert _far(weight.grad, d_y.flatten(0, 1).t() @ x.detach().flatten(0, 1)) < 0.09
    torch.testing.assert_close(bias.grad, d_y.sum((0, 1)))
    assert _far(y.detach(), exact) > 1e-4  # it did round


@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
def test_the_largest_value_is_kept_and_zeros_stay_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -3.5, 1.0, 0.25]])
    found = quantise(x, dtype)
    torch.testing.assert_close(found.values.float() * found.scale, x, rtol=0.07, atol=0)
    assert float(found.values.float()[0, 1]) == -torch.finfo(dtype).max
    assert quantise(torch.zeros(2, 3), dtype).values.float().abs().max() == 0


def test_two_products_of_one_input_are_as_each_alone() -> None:
    torch.manual_seed(2)
    d_ys = list(torch.randn(2, 8, 16))

    def run(*groups: list[int]) -> list[torch.Tensor | None]:
        torch.manual_seed(3)
        x = torch.randn(8, 32, requires_grad=True)
        weights = [torch.randn(16, 32, requires_grad=True) for _ in range(2)]
        outputs = [y for group in groups for y in fp8_matmuls(x, [weights[i] for i in group], [None] * len(group))]
        torch.autograd.backward(outputs, d_ys)
        return [*outputs, x.grad, *(weight.grad for weight in weights)]

    for together, alone in zip(run([0, 1]), run([0], [1]), strict=True):
        torch.testing.assert_close(together, alone)


def test_a_frozen_weight_costs_no_product_and_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    x, weight, bias = torch.randn(8, 32, requires_grad=True), torch.randn(16, 32), torch.randn(16)
    (y,) = fp8_matmuls(x, [weight], [bias])
    calls: list[object] = []
    compute = fp8.scaled_mm
    monkeypatch.setattr(fp8, "scaled_mm", lambda *args, **options: calls.append(args) or compute(*args, **options))
    y.sum().backward()
    assert len(calls) == 1
    assert x.grad is not None
    assert weight.grad is None
    trained, fixed = torch.randn(16, 32, requires_grad=True), torch.randn(8, 32)
    (y,) = fp8_matmuls(fixed, [trained], [None])
    y.sum().backward()
    assert len(calls) == 3  # one forward, one for the weight
    assert trained.grad is not None


def test_a_weight_is_rounded_once_in_a_step_and_anew_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    rounded: list[Sequence[torch.Tensor]] = []
    compute = fp8._quantise
    monkeypatch.setattr(fp8, "_quantise", lambda x, *others: rounded.append(x) or compute(x, *others))
    x, weight = torch.randn(16, 32), torch.randn(48, 32, requires_grad=True)
    found = []
    for _ in range(2):
        with fp8.weights_rounded_once():
            found.append([fp8_matmuls(x, [weight], [None])[0].detach() for _ in range(3)])
        with torch.no_grad():
            weight *= -2
    assert sum(given[0].data_ptr() == weight.data_ptr() for given in rounded) == 2
    assert torch.equal(found[1][0], -2 * found[0][0])
    assert all(torch.equal(one, same[0]) for same in found for one in same)


def test_a_kept_weight_is_not_taken_for_another_or_for_its_changed_self() -> None:
    torch.manual_seed(6)
    x, weight = torch.randn(16, 32), torch.randn(48, 32)
    with fp8.weights_rounded_once():
        (before,) = fp8_matmuls(x, [weight], [None])
        # Each factor is freed before the next is made, which would get its memory.
        assert all(torch.equal(fp8_matmuls(x, [weight * 2**n], [None])[0], before * 2**n) for n in range(1, 6))
        weight *= -2
        assert torch.equal(fp8_matmuls(x, [weight], [None])[0], before * -2)

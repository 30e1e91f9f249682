"""The gradient norm is that of 64-bit sums, however many elements there are and however they are cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from argosy.compat import square_sum
from argosy.model.objective import Loss
from argosy.parallel.shards import norm_of
from argosy.parallel.single import Sums

LARGE = 1 << 23


def reference(*tensors: torch.Tensor) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors)) ** 0.5


def skewed(count: int) -> torch.Tensor:
    """A few large elements first, and after them many that a 32-bit sum would lose."""
    values = torch.full((count,), 1e-4)
    values[:100] = 1.0
    return values


LARGE_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "random": lambda: torch.rand(LARGE),
    "skewed": lambda: skewed(LARGE),
    "equal": lambda: torch.full((LARGE,), 3e-3),
}


@pytest.mark.parametrize("kind", LARGE_TENSORS)
def test_the_norm_of_a_large_tensor_is_that_of_64_bit_sums(kind: str) -> None:
    values = LARGE_TENSORS[kind]()
    found = norm_of([values.view(2048, -1), torch.ones(3)])
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(reference(values, torch.ones(3)), rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cuts", [(), (1,), (256,), (1000, 70_001), (99_999,)])
def test_the_squares_of_parts_add_up_to_those_of_the_whole(dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    values = (torch.randn(100_000) * torch.logspace(-2, 2, 100_000)).to(dtype)
    parts = values.tensor_split(cuts)
    alone = sum(square_sum([part]) for part in (*parts, values[:0]))
    assert float(alone) == pytest.approx(float(square_sum([values])), rel=1e-6)
    assert float(square_sum(parts)) == pytest.approx(reference(values) ** 2, rel=1e-6)


def test_a_tensor_that_is_not_contiguous_counts_all_its_elements() -> None:
    values = torch.randn(300, 500)
    assert float(norm_of([values.t()[::2]])) == pytest.approx(reference(values.t()[::2]), rel=1e-6)


def test_losses_of_many_micro_batches_add_up_in_64_bits() -> None:
    """2^24 + 1 is no 32-bit number: a sum that has come so far would stay there."""
    sums = Sums(torch.device("cpu"))
    for value in map(torch.tensor, (2.0**24, 1.0, 1.0, 1.0)):
        sums.add(Loss(value, value, {"z_loss": value}))
    assert float(sums.loss) == float(sums.metrics["z_loss"]) == 2.0**24 + 3

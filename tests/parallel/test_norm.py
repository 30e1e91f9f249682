"""The gradient norm is that of 64-bit sums, however many elements there are and however they are cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from argosy.compat import square_sum
from argosy.model.objective import Loss
from argosy.model.ops.choice import installed, kernels
from argosy.parallel.shards import norm_of
from argosy.parallel.single import Sums

LARGE = 1 << 23
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEEDS_TRITON = pytest.mark.skipif(
    installed("triton") is None, reason="the kernel needs triton, which the dev extra brings on Linux"
)


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


def gradients() -> list[torch.Tensor]:
    """Tensors of every precision, length and layout, and what torch sums itself."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    found = [drawn(n % 7, 16).to((torch.bfloat16, torch.float32)[n % 2]) for n in range(120)]
    found += [drawn(), drawn(0), drawn(0, 5).bfloat16(), drawn(3).half(), drawn(2, 16384), drawn(40_001)]
    found += [drawn(30, 50).t(), drawn(30, 50)[::2, 1:], drawn(33).bfloat16()[1:], drawn(4, 8).double()]
    return found


@NEEDS_TRITON
def test_the_kernel_sums_tensors_of_any_length_layout_and_precision() -> None:
    given = gradients()
    with kernels(True):
        found = norm_of(given)
        assert torch.equal(found, norm_of(given))
        assert float(norm_of(given[120:123])) == pytest.approx(reference(*given[120:123]), rel=1e-6)
        assert float(norm_of([given[121]])) == 0
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(reference(*given), rel=1e-7)


@NEEDS_TRITON
@pytest.mark.parametrize("kind", LARGE_TENSORS)
def test_the_kernels_norm_of_a_large_tensor_is_that_of_64_bit_sums(kind: str) -> None:
    values = LARGE_TENSORS[kind]().to(DEVICE)
    with kernels(True):
        found = norm_of([values.view(2048, -1), torch.ones(3, device=DEVICE)])
    assert float(found) == pytest.approx(reference(values, torch.ones(3)), rel=1e-7)


@NEEDS_TRITON
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 39_999, 40_000])
def test_the_kernel_shows_what_is_no_number(what: float, where: int) -> None:
    values = torch.ones(40_001, device=DEVICE)
    values[where] = what
    with kernels(True):
        assert norm_of([torch.ones(16, device=DEVICE), values]).tolist() == pytest.approx(what, nan_ok=True)


if DEVICE == "cuda":

    def test_the_host_does_not_wait_for_the_kernel() -> None:
        given = gradients()
        norm_of(given)
        torch.cuda.set_sync_debug_mode("error")
        try:
            norm_of(given)
        finally:
            torch.cuda.set_sync_debug_mode("default")


COMPILE = """
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from argosy.model.ops.kernels.square_sum_kernel import _square_sums as kernel

signature = {"table": "*i64", "row_of": "*i32", "sums": "*fp64"}
for element in (tl.float32, tl.bfloat16, tl.float16):
    for aligned in (False, True):
        fixed = {"element": element, "ALIGNED": aligned, "B": 16384}
        constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
        source = ASTSource(kernel, signature | dict.fromkeys(fixed, "constexpr"), constants)
        assembly = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
        assert ("ld.global.v4" in assembly) == aligned, "aligned tensors are not read by wide loads"
"""


@NEEDS_TRITON
def test_the_kernel_compiles_for_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

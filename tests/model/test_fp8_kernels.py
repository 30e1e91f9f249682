"""Operations whose kernels round to 8 bits what they compute: as exact as the same operations matmul by matmul."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.model.test_kernels import DEVICE, Given
from torch import Tensor

from argosy.model.layers import MLP, Attention
from argosy.model.ops import activation, heads
from argosy.model.ops.choice import kernels
from argosy.model.ops.fp8 import fp8_matmuls
from argosy.model.ops.fp8_mlp import fp8_mlp
from argosy.model.ops.kernels import fp8_mlp_kernel, heads_kernel
from argosy.model.ops.largest import is_wanted
from argosy.model.positions import rope_tables

ROWS = 144 if DEVICE == "cuda" else 48


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles of which several fit into the little work that the interpreter does in a second."""
    torch.manual_seed(5)
    if DEVICE == "cpu":
        monkeypatch.setattr(fp8_mlp_kernel, "_QUADS", 4)
        monkeypatch.setattr(heads_kernel, "_QUADS", 4)
        monkeypatch.setattr(heads_kernel, "_TILES_DOWN", 2)


Operation = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _run(operation: Operation, inputs: Sequence[Tensor], dtype: torch.dtype, on: bool) -> list[Tensor]:
    """Return what the operation computes and the gradients of its inputs, by kernels or by plain torch."""
    given = [x.to(DEVICE, torch.bfloat16).to(dtype).requires_grad_() for x in inputs]
    with kernels(on):
        outs = operation(given)
        generator = torch.Generator().manual_seed(3)
        d_outs = [torch.randn(out.shape, generator=generator).to(out) for out in outs]
        torch.autograd.backward(list(outs), d_outs)
    return [*(out.detach() for out in outs), *(x.grad for x in given if x.grad is not None)]


def _as_exact_as(fused: Operation, apart: Operation, exact: Operation, inputs: Sequence[Tensor]) -> None:
    """Compare the errors of two 8-bit forms, next to 64 bits."""
    expected = _run(exact, inputs, torch.float64, False)
    for found, other, right in zip(
        _run(fused, inputs, torch.bfloat16, True), _run(apart, inputs, torch.bfloat16, True), expected, strict=True
    ):
        errors = [float((x.double() - right).norm() / right.norm()) for x in (found, other)]
        assert 1e-3 < errors[0] < 1.1 * errors[1] + 0.005


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["gelu_tanh", "gelu", "relu", "swiglu", "geglu"])
def test_an_mlp_is_as_exact_as_its_matmuls_apart(kind: str, biased: bool) -> None:
    count = 1 + (kind in activation.INNER)
    hidden, ffn = 64, 96
    inputs = [torch.randn(3, ROWS // 3, hidden), torch.randn(hidden, ffn) * 0.1]
    inputs += [torch.randn(ffn, hidden) * 0.1 for _ in range(count)]
    inputs += [torch.randn(ffn) for _ in range(count * biased)]

    def parts(given: Sequence[Tensor]) -> tuple[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
        x, down, *rest = given
        return x, down, rest[:count], rest[count:] or [None] * count

    def fused(given: Sequence[Tensor]) -> list[Tensor]:
        x, down, inner, biases = parts(given)
        return [fp8_mlp(x, kind, inner, biases, down)]

    def through(matmul: Callable[..., Sequence[Tensor]]) -> Operation:
        def run(given: Sequence[Tensor]) -> Sequence[Tensor]:
            x, down, inner, biases = parts(given)
            ys = matmul(x, inner, biases)
            a = activation.activate(kind, *ys, None) if count == 1 else activation.gated(kind, *ys)
            return matmul(a, [down], [None])

        return run

    _as_exact_as(fused, through(fp8_matmuls), through(_exactly), inputs)


def _exactly(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("biased", [False, True])
def test_heads_are_as_exact_as_a_matmul_and_a_split(rope: bool, kv_heads: int, group: int, biased: bool) -> None:
    batch, head_dim, hidden = 2, 16, 32
    seq, width = ROWS // batch, kv_heads * (group + 2) * head_dim
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    tables = rope_tables(torch.arange(seq, device=DEVICE)[None], frequencies) if rope else None
    inputs = [
        torch.randn(batch, seq, hidden),
        torch.randn(width, hidden) / hidden**0.5,
        *torch.randn(int(biased), width),
    ]

    def fused(given: Sequence[Tensor]) -> Sequence[Tensor]:
        x, weight, *bias = given
        rounds = Given(weight, bias[0] if bias else None, fuses=True)
        found = heads.project_heads(rounds, x, tables, group=group, head_dim=head_dim)
        assert is_wanted(found[0])  # attention is to note the largest gradients
        return found

    def apart(given: Sequence[Tensor]) -> Sequence[Tensor]:
        x, weight, *bias = given
        (product,) = fp8_matmuls(x, [weight], [bias[0] if bias else None])
        with kernels(False):
            return heads.split_heads(product, tables, group=group, head_dim=head_dim)

    def exact(given: Sequence[Tensor]) -> Sequence[Tensor]:
        x, weight, *bias = given
        return heads.project_heads(Given(weight, bias[0] if bias else None), x, tables, group=group, head_dim=head_dim)

    _as_exact_as(fused, apart, exact, inputs)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_what_is_no_number_is_not_rounded_to_one(what: float, where: str, kind: str) -> None:
    x = torch.randn(16, 32, device=DEVICE).bfloat16()
    d_out = torch.randn(16, 32, device=DEVICE).bfloat16()
    (x if where == "input" else d_out)[3, 5] = what
    x.requires_grad_()
    inner = [torch.randn(48, 32, device=DEVICE).bfloat16() for _ in range(1 + (kind == "swiglu"))]
    down = torch.randn(32, 48, device=DEVICE).bfloat16()
    with kernels(True):
        out = fp8_mlp(x, kind, inner, [None] * len(inner), down)
        assert out[3].isfinite().any() == (where == "gradient")
        out.backward(d_out)
    assert x.grad is not None
    assert not x.grad[3].isfinite().any()


@pytest.mark.parametrize("magnitude", [2.0**-30, 2.0**30])
def test_gradients_of_any_magnitude_are_rounded_alike(magnitude: float) -> None:
    x = torch.randn(32, 64, device=DEVICE).bfloat16().requires_grad_()
    inner = [(torch.randn(96, 64, device=DEVICE) * 0.1).bfloat16() for _ in range(2)]
    down = (torch.randn(64, 96, device=DEVICE) * 0.1).bfloat16()
    d_out = torch.randn(32, 64, device=DEVICE).bfloat16()
    found = []
    for factor in (1.0, magnitude):
        with kernels(True):
            out = fp8_mlp(x, "swiglu", inner, [None, None], down)
        (d_x,) = torch.autograd.grad(out, x, (d_out.float() * factor).bfloat16())
        found.append(d_x.double() / factor)
    assert torch.equal(*found)


@pytest.mark.parametrize("tokens", [3, 18])
def test_tokens_that_do_not_fill_a_word_are_multiplied_matmul_by_matmul(tokens: int) -> None:
    """With frozen weights, no matmul along the tokens refuses their number."""
    spec: Any = SimpleNamespace(
        hidden=32, ffn=48, activation="swiglu", gated=True, mlp_bias=False, heads=2, kv_heads=1, head_dim=16,
        attention_bias=True, qk_norm=False,
    )  # fmt: skip
    mlp, attention = (layer(spec).to(DEVICE, torch.bfloat16).requires_grad_(False) for layer in (MLP, Attention))
    context: Any = SimpleNamespace(rope=None, attend=lambda q, k, v: q + k + v)
    for parameter in (*mlp.parameters(), *attention.parameters()):
        parameter.copy_(torch.randn(parameter.shape) * 0.1)
    given, d_y = torch.randn(2, 1, tokens, 32, device=DEVICE).bfloat16()

    def run(dtype: torch.dtype, on: bool) -> list[Tensor]:
        for layer in (mlp.gate, mlp.up, mlp.down, attention.qkv, attention.out):
            layer.to(dtype).fp8 = on
        found = []
        for compute in (mlp, lambda x: attention(x, context)):
            x = given.to(dtype, copy=True).requires_grad_()
            with kernels(on):
                y = compute(x)
                found += [y.detach(), *torch.autograd.grad(y, x, d_y.to(dtype))]
        return found

    for found, expected in zip(run(torch.bfloat16, True), run(torch.float32, False), strict=True):
        assert float((found - expected).norm() / expected.norm()) < 0.25


@pytest.mark.parametrize("kind", ["gelu", "relu", "swiglu", "geglu"])
def test_tiny_inner_values_are_not_rounded_away(kind: str) -> None:
    """Their scale is theirs, and not that of the dip below zero of an activation."""
    x = torch.randn(16, 32, device=DEVICE).bfloat16()
    inner = [(torch.randn(48, 32, device=DEVICE) * 1e-7).bfloat16() for _ in range(1 + (kind in activation.INNER))]
    down = torch.randn(32, 48, device=DEVICE).bfloat16()
    with kernels(True):
        found = fp8_mlp(x, kind, inner, [None] * len(inner), down).double()
    ys = [x.double() @ weight.double().t() for weight in inner]
    with kernels(False):
        a = activation.gated(kind, *ys) if len(ys) == 2 else activation.activate(kind, *ys, None)
    right = a @ down.double().t()
    assert float((found - right).norm() / right.norm()) < (0.1 if DEVICE == "cuda" else 0.3)

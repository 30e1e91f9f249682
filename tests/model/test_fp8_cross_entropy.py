"""The output head whose backward matmuls are in 8-bit floats: the loss of 16 bits, and gradients within the rounding of 8."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from tests.model.test_kernels import DEVICE
from torch import Tensor
from torch.nn import functional as F

from argosy.model.ops import cross_entropy, fp8_cross_entropy
from argosy.model.ops.choice import kernels
from argosy.model.ops.cross_entropy import linear_cross_entropy, row_parts
from argosy.model.ops.fp8 import GRADIENT, weights_rounded_once
from argosy.model.ops.fp8_cross_entropy import SCALE, rounded_gradient
from argosy.model.ops.kernels import fp8_cross_entropy_kernel

TOKENS, WIDTH, VOCAB = 80, 32, 131
ALL = ("hidden", "weight", "bias")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make five chunks in three groups, and tiles of which several fit into the little work that the interpreter does in a second."""
    torch.manual_seed(11)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", TOKENS // 5 * VOCAB * 2)
    monkeypatch.setattr(fp8_cross_entropy, "GROUP_BYTES", 2 * TOKENS // 5 * 256)
    if DEVICE == "cpu":
        monkeypatch.setattr(fp8_cross_entropy_kernel, "_QUADS", 4)


class Given(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor


def given(tokens: int = TOKENS, width: int = WIDTH) -> Given:
    labels = torch.randint(0, VOCAB, (tokens,))
    labels[:4] = torch.tensor([0, VOCAB - 1, -100, 5])
    labels[7::9] = -100
    floats = torch.randn(tokens, width), 0.3 * torch.randn(VOCAB, width), torch.randn(VOCAB)
    return Given(*(value.to(DEVICE, torch.bfloat16) for value in floats), labels.to(DEVICE))


class Found(NamedTuple):
    total: Tensor
    cross_entropy: Tensor
    gradients: dict[str, Tensor | None]


def run(
    inputs: Given, *, fp8: bool, on: bool = False, wants: tuple[str, ...] = ALL, z_loss: float = 0.0, multiple: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Found:  # fmt: skip
    """Return the loss and the gradients of a multiple of it, by kernels or by plain torch."""
    leaves = {name: getattr(inputs, name).to(dtype, copy=True).requires_grad_(name in wants) for name in ALL}
    with kernels(on):
        total, ce = linear_cross_entropy(
            leaves["hidden"], leaves["weight"], inputs.labels, bias=leaves["bias"] if "bias" in wants else None, z_loss=z_loss,
            multiple=multiple, fp8_backward=fp8,
        )  # fmt: skip
        (total * 1e6).backward()
    return Found(total.detach(), ce, {name: leaf.grad for name, leaf in leaves.items()})


def far(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("wants", [ALL, ("hidden", "weight")])
def test_the_loss_is_that_of_16_bits_and_gradients_are_within_the_rounding_of_8(
    z_loss: float, wants: tuple[str, ...]
) -> None:
    inputs = given()
    exact, found = (run(inputs, fp8=on, wants=wants, z_loss=z_loss) for on in (False, True))
    assert torch.equal(found.total, exact.total)
    assert torch.equal(found.cross_entropy, exact.cross_entropy)
    assert (found.total != found.cross_entropy) == (z_loss > 0)
    for name in ("hidden", "weight"):
        assert 1e-3 < far(found.gradients[name], exact.gradients[name]) < 0.09, name
        assert found.gradients[name].dtype == torch.bfloat16  # type: ignore[union-attr]
    if "bias" in wants:  # is summed before it is rounded
        assert far(found.gradients["bias"], exact.gradients["bias"]) < 0.01
    assert not found.gradients["hidden"][inputs.labels == -100].any()  # type: ignore[index]


@pytest.mark.parametrize("tokens", [80, 77, 5])
@pytest.mark.parametrize("multiple", [1, 24])
def test_rows_and_columns_are_added_where_the_matmuls_need_them(tokens: int, multiple: int) -> None:
    inputs = given(tokens)
    exact, found = (run(inputs, fp8=on, multiple=multiple) for on in (False, True))
    assert far(found.total, exact.total) < 1e-3
    for name in ("hidden", "weight", "bias"):
        assert far(found.gradients[name], exact.gradients[name]) < 0.09, name


# A matmul for each chunk, and one for each group.
@pytest.mark.parametrize(("wants", "matmuls"), [(("hidden",), 5), (("weight",), 3), (("bias", "weight"), 3)])
def test_what_is_frozen_costs_no_matmul_and_gets_no_gradient(
    wants: tuple[str, ...], matmuls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, calls = given(), []
    compute = fp8_cross_entropy.scaled_product
    every = run(inputs, fp8=True, wants=ALL if "bias" in wants else ("hidden", "weight"))
    monkeypatch.setattr(
        fp8_cross_entropy, "scaled_product", lambda *args, **options: calls.append(args) or compute(*args, **options)
    )
    found = run(inputs, fp8=True, wants=wants)
    assert len(calls) == matmuls
    for name, gradient in found.gradients.items():
        assert (gradient is not None) == (name in wants)
        assert gradient is None or torch.equal(gradient, every.gradients[name])  # type: ignore[arg-type]


@pytest.mark.parametrize(("wants", "widest"), [(("hidden",), 16), (("weight",), 32)])
def test_a_frozen_head_keeps_the_gradients_of_one_chunk(
    wants: tuple[str, ...], widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    compute = fp8_cross_entropy.rounded_gradient

    def counted(*args: Any, **options: Any) -> Any:
        widths.append(args[3].stride(0))
        return compute(*args, **options)

    monkeypatch.setattr(fp8_cross_entropy, "rounded_gradient", counted)
    run(given(), fp8=True, wants=wants)
    assert max(widths) == widest


def test_it_is_for_gradients_and_widths_that_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("8-bit matmuls are asked for")

    inputs, odd = given(), given(width=24)
    monkeypatch.setattr(fp8_cross_entropy, "fp8_head_loss", refuse)
    with torch.no_grad():
        linear_cross_entropy(inputs.hidden, inputs.weight.clone().requires_grad_(), inputs.labels, fp8_backward=True)
    linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels, fp8_backward=True)
    assert far(run(odd, fp8=True).gradients["weight"], run(odd, fp8=False).gradients["weight"]) == 0
    with pytest.raises(AssertionError, match="8-bit"):
        run(inputs, fp8=True)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("tokens", [80, 77])
def test_the_kernels_compute_what_plain_torch_does(z_loss: float, tokens: int) -> None:
    inputs = given(tokens)
    exact = run(inputs, fp8=False, z_loss=z_loss, dtype=torch.float32)
    plain, fused = (run(inputs, fp8=True, on=on, z_loss=z_loss) for on in (False, True))
    torch.testing.assert_close(fused[:2], plain[:2], rtol=1e-3, atol=0)
    for name in ALL:
        # The interpreter cuts off the bits that the hardware rounds.
        bar = 1.1 * far(plain.gradients[name], exact.gradients[name]) + (0.005 if DEVICE == "cuda" else 0.1)
        assert far(fused.gradients[name], exact.gradients[name]) < bar, name


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_the_gradient_of_a_vocabulary_in_parts_is_that_of_the_whole(z_loss: float, on: bool) -> None:
    """With padding, whose gradients are zeros, plain and transposed."""
    ends, rows = [0, 37, 120, VOCAB], 48
    logits = (3 * torch.randn(rows, VOCAB)).to(DEVICE, torch.bfloat16)
    labels = given(rows).labels
    labels[4:6] = torch.tensor([36, 37])
    exact = logits.double().requires_grad_()
    lse = exact.logsumexp(-1)
    counted = (labels != -100).double()
    (F.cross_entropy(exact, labels, reduction="sum") + (z_loss * counted * lse * lse).sum()).backward()
    with kernels(on):
        sums = torch.stack([row_parts(logits[:, a:b].contiguous(), labels, b - a, a) for a, b in pairwise(ends)])
        lse = sums[:, 0].logsumexp(0)
        for a, b in pairwise(ends):
            part = F.pad(logits[:, a:b], (0, 16))
            # In columns of a wider matrix, as those of a chunk are.
            wide = torch.zeros(part.shape[1], 3 * rows, device=DEVICE).to(GRADIENT)
            values, d_bias = rounded_gradient(
                part, labels, lse, wide[:, rows : 2 * rows], z_loss, b - a, a, summed=True
            )
            assert torch.equal(values.t().float(), wide[:, rows : 2 * rows].float())
            assert not wide[:, :rows].float().any()
            assert not wide[:, 2 * rows :].float().any()
            assert not values[:, b - a :].float().any()
            right = exact.grad[:, a:b]  # type: ignore[index]
            # Half a step of e5m2. The interpreter loses the carry of a value that is rounded up to a power of two.
            step = 0.126 if DEVICE == "cuda" or not on else 0.501
            torch.testing.assert_close(values[:, : b - a].double() * SCALE, right, rtol=step, atol=1e-7)
            assert d_bias is not None
            torch.testing.assert_close(d_bias[: b - a].double(), right.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("on", [True, False])
def test_small_probabilities_are_kept_and_a_large_z_loss_is_cut_off(on: bool) -> None:
    logits = torch.zeros(16, 32, device=DEVICE)
    logits[:, 1:] = -torch.arange(1.0, 32, device=DEVICE) * 0.6
    labels, room = torch.full((16,), 31, device=DEVICE), torch.empty(32, 16, dtype=GRADIENT, device=DEVICE)
    for z_loss, least, most in ((0.0, 5e-9, 1.0), (1e3, 3.5, 3.5)):
        with kernels(on):
            lse = row_parts(logits, labels, 32)[0]
            found, _ = rounded_gradient(logits.clone(), labels, lse, room, z_loss, 32, 0, summed=False)
        sizes = found.float() * SCALE
        assert (sizes[:, :31] >= (least if z_loss == 0 else 0)).all()
        assert float(sizes.max()) <= most
        assert float(sizes[:, 0].min()) >= 0.3 * most


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("on", [True, False])
def test_what_is_no_number_is_not_rounded_to_one(on: bool) -> None:
    inputs = given()
    inputs.hidden[3, 5] = float("nan")
    found = run(inputs, fp8=True, on=on)
    assert found.total.isnan()
    assert found.gradients["hidden"][3].isnan().all()  # type: ignore[index]
    assert found.gradients["hidden"][40:].isfinite().all()  # type: ignore[index]


def test_a_padded_head_is_rounded_once_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each pads it anew."""
    rounded: list[tuple[int, ...]] = []
    compute = fp8_cross_entropy.quantise
    monkeypatch.setattr(
        fp8_cross_entropy, "quantise", lambda x, *others: rounded.append(tuple(x.shape)) or compute(x, *others)
    )
    inputs = given()
    weight = inputs.weight.clone().requires_grad_()
    hidden = inputs.hidden.clone().requires_grad_()
    for _ in range(2):
        with weights_rounded_once(), kernels(False):
            for _ in range(3):
                linear_cross_entropy(hidden, weight, inputs.labels, multiple=128, fp8_backward=True)
        with torch.no_grad():
            weight *= -2
    assert rounded.count((256, WIDTH)) == 2

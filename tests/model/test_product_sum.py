"""A matmul's output added to the residual stream by the kernel that multiplies. On a Hopper GPU the kernel runs; elsewhere what is around
it runs with its arithmetic in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")

from argosy.config.resolve import resolve_model
from argosy.model.build import build_model, initialise
from argosy.model.layers import AttentionBlock, Linear
from argosy.model.ops import beside, product_sum
from argosy.model.ops.choice import kernels
from argosy.model.ops.kernels import heads_kernel, hopper_matmul, norm_kernel, row_sums_kernel
from argosy.model.ops.matmul import weights_later
from argosy.parallel.tensor.apply import _connect
from argosy.parallel.transformer_blocks import apply_recompute
from model.small_matmuls import DEVICE, HOPPER, TOO_SMALL, UNLOADABLE, small_shapes, trained

# Tokens, inner and outer width; then parts of tiles in every direction, fewer tiles than processors, and many.
SHAPES = [(96, 512, 64)]
if HOPPER:
    SHAPES += [
        (1000, 520, 1040),
        (1, 1000, 272),
        (65, 512, 16),
        (129, 4104, 144),
        (4096, 5120, 1280),
        (5000, 2048, 2048),
    ]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """The weights of the products that are added to a stream, with small shapes too."""
    found: list[torch.Size] = []
    kernel = hopper_matmul.add_product

    def add_product(stream: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found.append(weight.shape)
        assert all(map(beside.is_loadable, (stream, x, weight)))
        if HOPPER and x.dtype == torch.bfloat16:
            return kernel(stream, x, weight, bias)
        total = stream.float() + (x.float() @ weight.float().t()).to(x.dtype).float()
        return (total if bias is None else total + bias.float()).to(x.dtype)

    monkeypatch.setattr(hopper_matmul, "add_product", add_product)
    # Interpreted, each program takes milliseconds.
    monkeypatch.setattr(norm_kernel, "_PROGRAMS", 2)
    monkeypatch.setattr(heads_kernel, "_TILES_DOWN", 1)
    with small_shapes(monkeypatch):
        yield found


def drawn(tokens: int, depth: int, width: int, biased: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return a stream, an input, a weight and a bias."""
    torch.manual_seed(1)
    stream, x = torch.randn(tokens, width, device=DEVICE), torch.randn(tokens, depth, device=DEVICE)
    weight, bias = torch.randn(width, depth, device=DEVICE) * depth**-0.5, torch.randn(width, device=DEVICE)
    stream, x, weight, bias = (t.bfloat16().requires_grad_() for t in (stream[None], x[None], weight, bias))
    return stream, x, weight, bias if biased else None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "depth", "width"), SHAPES)
def test_results_and_gradients_are_those_of_32_bits(tokens: int, depth: int, width: int, biased: bool) -> None:
    stream, x, weight, bias = drawn(tokens, depth, width, biased)
    leaves = [t for t in (stream, x, weight, bias) if t is not None]
    d_out = torch.randn_like(stream)
    out = product_sum.product_sum(stream, x, weight, bias)
    exact = stream.float() + x.float() @ weight.float().t() + (0 if bias is None else bias.float())
    ours = [out, *torch.autograd.grad(out, leaves, d_out)]
    theirs = [exact, *torch.autograd.grad(exact, leaves, d_out.float())]
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert (one.float() - other).norm() < 1e-2 * other.norm()


@pytest.mark.parametrize("biased", [False, True])
def test_the_output_is_rounded_before_it_is_added(biased: bool) -> None:
    """So the bits do not depend on whether another kernel adds it, where both matmuls have the same."""
    stream, x, weight, bias = drawn(*((4096, 1024, 512) if HOPPER else (64, 512, 64)), biased)
    # Sums of few bits, which are the same in any order.
    with torch.no_grad():
        x.copy_(x.sign())
        weight.copy_((weight * 4 * len(weight[0]) ** 0.5).round() / 16)
        apart = stream.float() + (x.float() @ weight.float().t()).bfloat16().float()
        apart = apart if bias is None else apart + bias.float()
        runs = [product_sum.product_sum(stream, x, weight, bias) for _ in range(10 if HOPPER else 1)]
    assert all(torch.equal(run, apart.bfloat16()) for run in runs)


def test_an_input_that_is_not_contiguous_is_copied() -> None:
    stream, x, weight, _ = drawn(64, 512, 64, False)
    turned = x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    with torch.no_grad():
        found = product_sum.product_sum(stream, turned, weight, None)
        assert torch.equal(found, product_sum.product_sum(stream, x, weight, None))


WHY_NOT = ["32 bits", "a transposed stream", "no tokens", "a narrow row", *TOO_SMALL, *UNLOADABLE]


@pytest.mark.parametrize("why", ["nothing", *WHY_NOT])
def test_the_kernel_is_not_used_where_it_cannot_serve(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, _, weight, _ = drawn(64, 512, 72 if why == "a narrow row" else 64, False)
    stream, weight = stream.detach(), weight.detach()
    if why == "32 bits":
        stream, weight = stream.float(), weight.float()
    elif why == "a transposed stream":
        stream = stream.transpose(1, 2)
    elif why == "no tokens":
        stream = stream[:, :0]
    elif why in TOO_SMALL:
        TOO_SMALL[why](monkeypatch)
    elif why in UNLOADABLE:
        weight = UNLOADABLE[why](weight)
    assert beside.serves(stream, weight) == (why == "nothing")


def small(preset: str, *more: str) -> nn.Module:
    sizes = ["layers=1", "hidden=32", "heads=4", "head_dim=16", "ffn=48", "vocab_size=97", "max_seq_len=24", *more]
    spec = resolve_model(preset, sizes)
    model = build_model(spec, str(DEVICE))
    initialise(model, spec, seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve small models, and their 32 bits."""
    monkeypatch.setattr("argosy.model.layers.serves", lambda stream, weight: True)


ATTENTION, DOWN = torch.Size((32, 64)), torch.Size((32, 48))
MODELS = {
    "gpt2": ((), [ATTENTION, DOWN]),
    "llama3-1b": (("kv_heads=2",), [ATTENTION, DOWN]),
    # Experts are added by a pass of their own.
    "mixtral-8x7b": (("kv_heads=2", "moe.experts=4", "moe.ffn=40"), [ATTENTION]),
    # Of the decoder's blocks, whose cross-attention comes in between, only the last matmul.
    "t5-v1.1-small": (("decoder_layers=1", "dropout=0"), [ATTENTION, DOWN, DOWN]),
    # A norm comes in between.
    "gemma3-270m": (("kv_heads=2",), []),
    "bert-base": (("pair=none", "dropout=0"), []),
}


@pytest.mark.usefixtures("any_shape")
@pytest.mark.parametrize("preset", MODELS)
def test_a_whole_model_is_the_same_with_and_without_it(
    preset: str, calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    more, expected = MODELS[preset]
    model = small(preset, *more)
    decoded = preset.startswith("t5")
    ours = trained(model, decoded=decoded)
    assert calls == expected
    monkeypatch.setattr(AttentionBlock, "fuses_sums", False)
    for one, other in zip(ours, trained(model, decoded=decoded), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.usefixtures("any_shape")
def test_the_norm_that_follows_sums_the_gradient_of_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("gpt2")
    expected = trained(model)
    monkeypatch.delattr(row_sums_kernel, "column_sums")
    assert all(map(torch.equal, trained(model), expected))


def test_a_frozen_bias_is_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, x, weight, bias = drawn(64, 512, 64, True)
    assert bias is not None
    bias.requires_grad_(False)
    monkeypatch.delattr(row_sums_kernel, "column_sums")
    product_sum.product_sum(stream, x, weight, bias).sum().backward()
    assert stream.grad is not None
    assert (stream.grad == 1).all()


def test_a_gradient_that_is_not_contiguous_is_summed() -> None:
    stream, x, weight, bias = drawn(64, 512, 64, True)
    assert bias is not None
    product_sum.product_sum(stream, x, weight, bias).sum().backward()
    assert bias.grad is not None
    assert (bias.grad == 64).all()


@pytest.mark.usefixtures("any_shape")
def test_it_is_not_used_where_kernels_are_off(calls: list[torch.Size]) -> None:
    model = small("gpt2")
    with kernels(False):
        model(torch.zeros(1, 4, dtype=torch.long, device=DEVICE))
    assert not calls


@pytest.mark.usefixtures("any_shape")
@pytest.mark.parametrize("why", ["dropout", "8-bit floats", "adapters", "selective recompute", "tensor parallelism"])
def test_it_is_not_used_where_something_comes_in_between(why: str, calls: list[torch.Size]) -> None:
    model = small("gpt2", *(["dropout=0.1"] if why == "dropout" else []))
    blocks = [module for module in model.modules() if isinstance(module, AttentionBlock)]
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    stream = torch.randn(2, 6, 32, device=DEVICE)
    if why == "8-bit floats":
        for layer in layers:
            layer.fp8 = True
    elif why == "adapters":
        for layer in layers:
            layer.lora_scale = 1.0
    elif why == "selective recompute":
        apply_recompute(model, "selective")
    elif why == "tensor parallelism":
        region: Any = SimpleNamespace(enter=torch.clone, leave=torch.clone)
        for block in blocks:
            _connect(block, region)
    with kernels(True):
        assert not any(block._adds(block.attn.out, stream, None) for block in blocks)
        model.eval()
        used = why in ("dropout", "8-bit floats")
        assert all(block._adds(block.attn.out, stream, None) == used for block in blocks)


@pytest.mark.usefixtures("any_shape")
def test_full_recompute_uses_it_and_gives_the_same_bits(calls: list[torch.Size]) -> None:
    model = small("gpt2")
    expected = trained(model)
    calls.clear()
    apply_recompute(model, "full")
    assert all(map(torch.equal, trained(model), expected))
    assert calls == [ATTENTION, DOWN] * 2 or calls == [ATTENTION, DOWN, ATTENTION]


def test_weight_gradients_can_wait() -> None:
    stream, x, weight, bias = drawn(64, 512, 64, True)
    out = product_sum.product_sum(stream, x, weight, bias)
    [now] = torch.autograd.grad(out, [weight], torch.ones_like(out), retain_graph=True)
    with weights_later() as later:
        out.backward(torch.ones_like(out))
    assert weight.grad is None
    later.run()
    assert weight.grad is not None
    assert torch.equal(weight.grad, now)

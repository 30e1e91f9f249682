"""Queries, keys and values that the kernel turns which multiplies for them. On a Hopper GPU the kernel runs; elsewhere what is around it runs
with its arithmetic in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")

from argosy.config.resolve import resolve_model
from argosy.model.build import build_model, initialise
from argosy.model.layers import MLP, Attention, Linear
from argosy.model.ops import beside, cross_entropy, heads, hopper, turned_heads
from argosy.model.ops.choice import kernels
from argosy.model.ops.kernels import heads_kernel, hopper_matmul, norm_kernel
from argosy.model.ops.matmul import weights_later
from argosy.parallel.transformer_blocks import apply_recompute
from model.small_matmuls import DEVICE, HOPPER, TOO_SMALL, UNLOADABLE, small_shapes, trained, transposed

LATER_FORMS = beside._LATER_FORMS
# Samples and tokens of each, hidden size, KV heads, query heads of each, head size; then parts of tiles in every direction, and many tiles.
SHAPES = [(2, 24, 512, 2, 3, 64), (1, 24, 512, 1, 1, 128), (1, 8, 512, 1, 2, 256)]
if HOPPER:
    SHAPES += [(3, 333, 520, 3, 1, 64), (1, 1, 1000, 2, 4, 128), (4, 1024, 2048, 8, 4, 64), (2, 2048, 4104, 8, 4, 128)]


def twin(x: Tensor, weight: Tensor, rope: tuple[Tensor, Tensor], group: int, head_dim: int) -> tuple[Tensor, ...]:
    """Return what the kernel does, by plain torch. The product is rounded before it is turned."""
    product = (x.float() @ weight.float().t()).to(x.dtype)[None]
    cos, sin = (table.repeat(len(x) // len(table), 1)[None] for table in rope)
    found = heads.split_heads(product, (cos, sin), group=group, head_dim=head_dim)
    return tuple(t[0].transpose(0, 1).flatten(1).contiguous() for t in found)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that run, with small shapes too."""
    found: list[str] = []
    kernel = hopper_matmul.product_heads

    def product_heads(x: Tensor, weight: Tensor, rope: tuple[Tensor, Tensor], *form: int) -> tuple[Tensor, ...]:
        found.append("heads")
        assert all(t.is_contiguous() for t in (x, weight, *rope))
        return kernel(x, weight, rope, *form) if HOPPER and x.dtype == torch.bfloat16 else twin(x, weight, rope, *form)

    monkeypatch.setattr(hopper_matmul, "product_heads", product_heads)
    if not HOPPER:
        monkeypatch.setattr(
            hopper_matmul, "plain_product", lambda x, weight: (x.float() @ weight.float().t()).to(x.dtype)
        )
    # Interpreted, each program takes milliseconds.
    monkeypatch.setattr(norm_kernel, "_PROGRAMS", 2)
    monkeypatch.setattr(heads_kernel, "_TILES_DOWN", 1)
    with small_shapes(monkeypatch):
        yield found


def drawn(samples: int, tokens: int, hidden: int, kv_heads: int, group: int, head_dim: int) -> tuple[Tensor, ...]:
    """Return an input, a weight, and cos and sin."""
    torch.manual_seed(1)
    x = torch.randn(samples, tokens, hidden, device=DEVICE)
    weight = torch.randn(kv_heads * (group + 2) * head_dim, hidden, device=DEVICE) * hidden**-0.5
    angles = torch.rand(1, tokens, head_dim // 2, device=DEVICE) * 6
    return x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), angles.cos(), angles.sin()


def passed(found: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    """Return heads, and the gradients of a sum with random factors."""
    torch.manual_seed(2)
    factors = [torch.randn_like(t, dtype=torch.float32) for t in found]
    total = sum((t.float() * factor).sum() for t, factor in zip(found, factors, strict=True))
    assert isinstance(total, Tensor)
    return [*found, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_and_gradients_are_those_of_32_bits(shape: tuple[int, ...], calls: list[str]) -> None:
    x, weight, cos, sin = drawn(*shape)
    group, head_dim = shape[4:]
    with kernels(True):
        ours = passed(turned_heads.turned_heads(x, weight, (cos, sin), group, head_dim), [x, weight])
    exact = heads.split_heads(x.float() @ weight.float().t(), (cos, sin), group=group, head_dim=head_dim)
    assert calls == ["heads"]
    for one, other in zip(ours, passed(exact, [x, weight]), strict=True):
        assert one.shape == other.shape
        assert (one.float() - other.float()).norm() < 1e-2 * other.float().norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_their_bits_are_those_of_a_matmul_and_a_pass_that_turns(shape: tuple[int, ...]) -> None:
    """So they do not depend on which of the two a layout uses."""
    x, weight, cos, sin = (t.detach() for t in drawn(*shape))
    group, head_dim = shape[4:]
    # Products of few bits, which are the same in any order.
    x, weight = x.sign(), (weight * 4 * x.shape[-1] ** 0.5).round() / 16
    apart = Linear(x.shape[-1], len(weight), bias=False, device=DEVICE, dtype=x.dtype)
    apart.weight.data = weight
    with kernels(True), torch.no_grad():
        ours = turned_heads.turned_heads(x, weight, (cos, sin), group, head_dim)
        theirs = heads.project_heads(apart, x, (cos, sin), group=group, head_dim=head_dim, fused=False)
    for one, other in zip(ours, theirs, strict=True):
        # The interpreter of kernels rounds towards zero.
        torch.testing.assert_close(one, other, rtol=0 if HOPPER else 1e-2, atol=0)


WHY_NOT = ["a bias", "no rope", "8-bit floats", "adapters", "32 bits", "a transposed input", "no tokens"]
WHY_NOT += ["narrow heads", "wide heads", "tables apart", "not allowed", *TOO_SMALL, *UNLOADABLE]


@pytest.mark.parametrize("why", ["nothing", *WHY_NOT])
def test_the_kernel_is_not_used_where_it_cannot_serve(
    why: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    head_dim = {"narrow heads": 32, "wide heads": 512}.get(why, 64)
    x, weight, cos, sin = (t.detach() for t in drawn(1, 16, 512, 1, 2, head_dim))
    qkv = Linear(512, len(weight), bias=why == "a bias", device=DEVICE, dtype=x.dtype)
    qkv.weight.data = weight
    rope: Any = None if why == "no rope" else (cos, sin)
    if why == "8-bit floats":
        qkv.fp8 = True
        monkeypatch.setattr(heads, "is_whole", lambda x: False)
        monkeypatch.setattr("argosy.model.layers.fp8_matmuls", lambda x, weights, _: [x @ weights[0].t()])
    elif why == "adapters":
        qkv.lora_a, qkv.lora_b = (
            nn.Parameter(torch.zeros(*s, device=DEVICE, dtype=x.dtype)) for s in ((4, 512), (len(weight), 4))
        )
        qkv.lora_scale = 1.0
    elif why == "32 bits":
        x, qkv = x.float(), qkv.float()
    elif why == "a transposed input":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif why == "no tokens":
        x, rope = x[:, :0], (cos[:, :0], sin[:, :0])
    elif why in TOO_SMALL:
        TOO_SMALL[why](monkeypatch)
    elif why in UNLOADABLE:
        weight = UNLOADABLE[why](weight)
    elif why == "tables apart":
        rope = tuple(transposed(t[0])[None] for t in (cos, sin))
    with kernels(True), torch.no_grad():
        if why in ("tables apart", "no tokens", *UNLOADABLE):
            assert not turned_heads.serves_heads(x, weight, rope, head_dim)
            return
        heads.project_heads(qkv, x, rope, group=2, head_dim=head_dim, fused=why != "not allowed")
    assert calls == (["heads"] if why == "nothing" else [])


def small(preset: str = "llama3-1b", *more: str) -> nn.Module:
    sizes = [
        "layers=1",
        "hidden=512",
        "heads=4",
        "kv_heads=2",
        "head_dim=64",
        "ffn=48",
        "vocab_size=97",
        "max_seq_len=24",
    ]
    spec = resolve_model(preset, [*sizes, *more])
    model = build_model(spec, str(DEVICE)).to(torch.bfloat16)
    initialise(model, spec, seed=1)
    for module in model.modules():
        if isinstance(module, MLP):
            module.fuses_activation = False
    return model


def forbid(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            module.fuses_rope = False


def test_a_whole_model_is_the_same_with_and_without_it(calls: list[str]) -> None:
    model = small()
    ours = trained(model)
    assert calls == ["heads"]
    forbid(model)
    for one, other in zip(ours, trained(model), strict=True):
        assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()
    assert calls == ["heads"]


def test_heads_with_norms_are_turned_after_them(calls: list[str]) -> None:
    trained(small("llama3-1b", "qk_norm=true"))
    assert not calls


@pytest.mark.parametrize(("how", "passes"), [("full", 2), ("selective", 0)])
def test_selective_recompute_runs_matmuls_once_and_so_cannot_use_it(how: str, passes: int, calls: list[str]) -> None:
    model = small()
    whole = trained(model)
    calls.clear()
    apply_recompute(model, how)
    found = trained(model)
    assert len(calls) == passes
    for one, other in zip(found, whole, strict=True):
        assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()


def test_weight_gradients_can_wait() -> None:
    x, weight, cos, sin = drawn(*SHAPES[0])
    with kernels(True):
        found = turned_heads.turned_heads(x, weight, (cos, sin), 3, 64)
        total = sum((t.float() ** 2).sum() for t in found)
        assert isinstance(total, Tensor)
        [now] = torch.autograd.grad(total, [weight], retain_graph=True)
        with weights_later() as later:
            total.backward()
        assert weight.grad is None
        later.run()
    assert weight.grad is not None
    assert torch.equal(weight.grad, now)


VERSIONS = [("3.6.0", True), ("3.7.1", False), ("3.9.0", False)]


@pytest.mark.parametrize(("version", "runs"), VERSIONS)
def test_they_run_only_with_the_version_of_triton_they_have_run_with(
    version: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with small_shapes(monkeypatch):
        monkeypatch.setattr(beside, "_LATER_FORMS", LATER_FORMS)
        monkeypatch.setattr(beside, "gluon_refusal", hopper.gluon_refusal)
        monkeypatch.setattr(hopper, "gpu_refusal", lambda device, capabilities: None)
        monkeypatch.setattr(hopper, "_TRITON", version)
        x, weight, cos, sin = drawn(*SHAPES[0])
        assert turned_heads.serves_heads(x, weight, (cos, sin), 64) == beside.multiplies(x, weight) == runs
        # The form that adds to a stream has run with all.
        assert beside.serves(x, weight)


@pytest.mark.parametrize("biased", [False, True])
def test_logits_are_those_of_the_kernel_where_they_have_no_bias(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Size] = []
    multiply = hopper_matmul.plain_product

    def plain_product(x: Tensor, weight: Tensor) -> Tensor:
        asked.append(weight.shape)
        return multiply(x, weight)

    monkeypatch.setattr(hopper_matmul, "plain_product", plain_product)
    torch.manual_seed(1)
    hidden = torch.randn(40, 512, device=DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(300, 512, device=DEVICE) * 512**-0.5).bfloat16().requires_grad_()
    bias = torch.zeros(300, device=DEVICE, dtype=torch.bfloat16) if biased else None
    labels = torch.randint(0, 300, (40,), device=DEVICE)
    with kernels(True):
        total, _ = cross_entropy.linear_cross_entropy(hidden, weight, labels, bias=bias, multiple=128)
        found = [total, *torch.autograd.grad(total, [hidden, weight])]
    assert asked == ([] if biased else [torch.Size((384, 512))])
    exact = torch.nn.functional.cross_entropy(hidden.float() @ weight.float().t(), labels, reduction="sum")
    for one, other in zip(found, [exact, *torch.autograd.grad(exact, [hidden, weight])], strict=True):
        assert (one.float() - other.float()).norm() < 1e-2 * other.float().norm()

"""Gradients of 16-bit weights that micro-batches sum in 32 bits: the matmul itself adds to the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from argosy.compat import accumulate_in
from argosy.compat.absent_peers import fake_ranks
from argosy.config.resolve import resolve_model
from argosy.model.build import build_model, initialise
from argosy.model.layers import Linear
from argosy.model.objective import Objective
from argosy.model.ops import matmul
from argosy.model.ops.choice import kernels
from argosy.model.ops.fp8 import fp8_matmuls
from argosy.model.ops.grouped import grouped_linear
from argosy.model.ops.matmul import matmuls, separable, weights_later
from argosy.parallel.cutting import cut_parameters

TOKENS, WIDTH = 32, 16
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda x, weight: matmuls(x, [weight], [None])[0],
    "fp8": lambda x, weight: fp8_matmuls(x, [weight], [None])[0],
    "grouped": lambda x, weight: grouped_linear(x, weight, torch.tensor([TOKENS], dtype=torch.int32, device=x.device)),
}
MICRO_BATCHES = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def required(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def inputs() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_() for _ in range(MICRO_BATCHES)]


def make_weight(operation: str = "plain") -> nn.Parameter:
    torch.manual_seed(0)
    experts = [1] if operation == "grouped" else []
    weight = nn.Parameter(torch.randn(*experts, WIDTH, WIDTH).bfloat16())
    accumulate_in(weight, torch.float32)
    return weight


def gradients(weight: nn.Parameter, operation: str) -> Iterator[Tensor]:
    """The sum after each micro-batch."""
    with separable():
        for x in inputs():
            OPERATIONS[operation](x, weight).square().sum().backward()
            assert weight.grad is not None
            yield weight.grad


def expected_sums(operation: str) -> list[Tensor]:
    """The sums of the gradients that autograd computes, each alone and in 16 bits."""
    alone = []
    for n in range(MICRO_BATCHES):
        weight = make_weight(operation)
        accumulate_in(weight, torch.bfloat16)
        with separable():
            OPERATIONS[operation](inputs()[n], weight).square().sum().backward()
        assert weight.grad is not None
        assert weight.grad.dtype == torch.bfloat16
        alone.append(weight.grad.float())
    return list(torch.stack(alone).cumsum(0))


# On a CPU a gradient is rounded to 16 bits before it is added; 8-bit matmuls have a result of 32 bits.
@pytest.mark.parametrize(("operation", "error"), [("plain", 0), ("grouped", 0), ("fp8", 4e-3)])
def test_a_sum_in_place_is_that_of_the_gradients(operation: str, error: float) -> None:
    weight, seen, computed = make_weight(operation), list[Tensor](), list[Tensor | None]()
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(required(parameter.grad).clone()))
    weight.register_hook(computed.append)
    places = set()
    for total, wanted in zip(gradients(weight, operation), expected_sums(operation), strict=True):
        assert total.dtype == torch.float32
        assert float((total - wanted).norm()) <= error * float(wanted.norm())
        # Who waits for the gradients is told when they are there.
        assert torch.equal(seen[-1], total)
        places.add(total.data_ptr())
    assert len(seen) == MICRO_BATCHES
    assert len(places) == 1
    assert set(computed) == {None}  # autograd had no gradient to add


def test_hooks_run_once_after_the_last_use_of_a_weight() -> None:
    weight, seen = make_weight(), list[Tensor]()
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(required(parameter.grad).clone()))
    with separable():
        [x] = matmuls(inputs()[0], [weight], [None])
        matmuls(x, [weight], [None])[0].square().sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], required(weight.grad))


def test_a_deferred_gradient_is_added_when_it_is_computed() -> None:
    weight, wanted = make_weight(), make_weight()
    *_, total = gradients(wanted, "plain")
    with separable():
        for x in inputs():
            before = None if weight.grad is None else weight.grad.clone()
            with weights_later() as later:
                matmuls(x, [weight], [None])[0].square().sum().backward()
            assert x.grad is not None
            assert (weight.grad is None) if before is None else torch.equal(weight.grad, before)
            later.run()
    assert torch.equal(weight.grad, total)


def test_a_gradient_in_the_bits_of_its_weight_is_left_to_autograd() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH).bfloat16())
    *_, total = gradients(weight, "plain")
    assert total.dtype == torch.bfloat16


@contextmanager
def a_shard() -> Iterator[Linear]:
    """The half of a layer that the first of two ranks has."""
    with fake_ranks(0, 2):
        layer = Linear(WIDTH, 2 * WIDTH, bias=True, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight[:WIDTH].copy_(make_weight())
            layer.bias.zero_()
        cut_parameters(layer, {"weight": 0, "bias": 0}, init_device_mesh("cpu", (2,)))
        for parameter in layer.parameters():
            accumulate_in(parameter, torch.float32)
        yield layer


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("watched", [False, True])
def test_a_shard_of_a_parameter_has_the_sum_of_a_plain_one(deferred: bool, watched: bool) -> None:
    *_, expected = gradients(make_weight(), "plain")
    seen, computed = list[Tensor](), list[Tensor | None]()
    with a_shard() as layer, separable():
        weight, bias = (layer._parameters[name] for name in ("weight", "bias"))
        assert weight is not None
        assert bias is not None
        weight.register_hook(computed.append)
        bias.register_hook(computed.append)
        if watched:
            weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
        for n, x in enumerate(inputs()):
            with weights_later() if deferred else nullcontext() as later:
                (matmuls(x, [layer.weight], [None])[0] + layer.bias).square().sum().backward()
            if later is not None:
                assert n or weight.grad is None  # no zeros in its place
                later.run()
        assert isinstance(weight.grad, DTensor)
        assert torch.equal(weight.grad.to_local(), expected)
        assert isinstance(bias.grad, DTensor)
        assert bias.grad.dtype == torch.float32
        assert set(computed) == {None}
        # Once a pass, whether its gradients are deferred or not.
        assert len(seen) == (MICRO_BATCHES if watched else 0)


def small_model(preset: str) -> tuple[nn.Module, Tensor]:
    """A tiny model in bf16 whose gradients are summed in 32 bits, and tokens."""
    sizes = ["layers=1", "hidden=32", "heads=2", "head_dim=16", "ffn=48", "vocab_size=97", "max_seq_len=24"]
    few = {"llama3-1b": ["kv_heads=1"], "mixtral-8x7b": ["kv_heads=1", "moe.experts=4", "moe.ffn=40"]}
    spec = resolve_model(preset, sizes + few.get(preset, []))
    model = build_model(spec, DEVICE)
    initialise(model, spec, seed=1)
    # So few different ones that some occur twice: the table's gradient is then a sum in each micro-batch.
    return model.bfloat16(), torch.randint(0, 4, (2, 1, 6), device=DEVICE)


def summed_gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    for batch in tokens:
        with kernels(True):
            loss = model(batch, batch.flip(1), Objective())
        loss.total.backward()
    return {name: required(parameter.grad).float() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("preset", ["gpt2", "llama3-1b", "mixtral-8x7b"])
def test_kernels_add_the_gradients_of_a_model_up_in_32_bits(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "split_of", lambda *_: 2)
    model, tokens = small_model(preset)
    rounded = [summed_gradients(model, batch[None]) for batch in tokens]
    model.zero_grad()
    dtypes: dict[str, set[torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        accumulate_in(parameter, torch.float32)
        found = dtypes.setdefault(name, set())
        parameter.register_hook(lambda gradient, found=found: None if gradient is None else found.add(gradient.dtype))
    for name, total in summed_gradients(model, tokens).items():
        expected = torch.stack([each[name] for each in rounded]).sum(0)
        assert float((total - expected).norm()) <= 1e-2 * float(expected.norm()), name
        assert not torch.equal(total, total.bfloat16().float()), name
    # No kernel rounds what is summed, and autograd converts nothing.
    assert all(found <= {torch.float32} for found in dtypes.values()), dtypes


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_sum_that_is_not_contiguous_is_left_to_autograd(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "split_of", lambda *_: 2)
    weight = make_weight(operation).to(DEVICE).detach().requires_grad_()
    accumulate_in(weight, torch.float32)
    x = inputs()[0].detach().to(DEVICE)
    with kernels(True), separable():
        OPERATIONS[operation](x, weight).square().sum().backward()
        expected = 2 * required(weight.grad)
        weight.grad = required(weight.grad).mT.contiguous().mT
        OPERATIONS[operation](x, weight).square().sum().backward()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))

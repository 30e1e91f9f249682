"""Gradients of 16-bit weights that micro-batches sum in 32 bits: added to the sum by the matmul itself, with the bits autograd gets."""

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
from argosy.model.layers import Linear
from argosy.model.ops.fp8 import fp8_matmuls
from argosy.model.ops.grouped import grouped_linear
from argosy.model.ops.matmul import matmuls, separable, weights_later
from argosy.parallel.cutting import cut_parameters

TOKENS, WIDTH = 32, 16
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda x, weight: matmuls(x, [weight], [None])[0],
    "fp8": lambda x, weight: fp8_matmuls(x, [weight], [None])[0],
    "grouped": lambda x, weight: grouped_linear(x, weight, torch.tensor([TOKENS], dtype=torch.int32)),
}
MICRO_BATCHES = 3


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


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_sum_in_place_has_the_bits_of_autograds(operation: str) -> None:
    seen: list[Tensor] = []
    watched = make_weight(operation)
    watched.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    expected = [total.clone() for total in gradients(watched, operation)]
    assert len(seen) == MICRO_BATCHES  # whoever waits for a gradient is told
    totals = [(total.data_ptr(), total.clone()) for total in gradients(make_weight(operation), operation)]
    assert all(torch.equal(total, wanted) for (_, total), wanted in zip(totals, expected, strict=True))
    assert expected[0].dtype == torch.float32
    assert len({place for place, _ in totals}) == 1


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
    seen: list[Tensor] = []
    with a_shard() as layer, separable():
        weight, bias = (layer._parameters[name] for name in ("weight", "bias"))
        assert weight is not None
        assert bias is not None
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
        assert bool(seen) == watched

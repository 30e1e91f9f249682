"""Matrix products of one input, one or several, as the gate and the up projection of an MLP.

The gradients each product has for the input are added up by the products themselves, where plain autograd would write
every one out and add them afterwards. The gradient of a small weight is cut along the tokens (`split_of`).

The gradient of a weight may be put off (`weights_later`). A backward pass needs the gradients of inputs at once, since another layer waits
for them; those of weights are needed only at the end of a step. Whoever puts them off fills with them the time in which a
pipeline has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.model.ops.choice import use_kernel

_TILES = ((128, 256), (256, 128), (192, 192), (256, 192), (192, 256), (320, 128), (128, 320), (128, 128))  # of cuBLAS
_SMALL_TILE = 0.85  # how fast the smallest of them works, measured against the others
_SUM_COST = 180  # tokens: a product of so many takes as long as reading its result once


def matmuls(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """x weight^T + bias for every weight [out, in] of x [.., in]."""
    if is_separable() or use_kernel(x):
        found: tuple[Tensor, ...] = _Products.apply(x, *weights, *biases)
        return found
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        weights, biases = factors[: len(factors) // 2], factors[len(factors) // 2 :]
        ctx.save_for_backward(x, *weights)
        ctx.weights = weights  # themselves: what was saved may be a copy
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, *weights = ctx.saved_tensors
        d_ys = [d_y.flatten(0, -2) for d_y in gradients]
        wanted = iter(ctx.needs_input_grad)
        d_x = None
        if next(wanted):
            d_x = d_ys[0] @ weights[0]
            for d_y, weight in zip(d_ys[1:], weights[1:], strict=True):
                d_x = d_x.addmm_(d_y, weight)
            d_x = d_x.view_as(x)
        rows = x.flatten(0, -2)
        d_weights = [
            now_or_later(weight, partial(weight_gradient, d_y, rows)) if next(wanted) else None
            for weight, d_y in zip(ctx.weights, d_ys, strict=True)
        ]
        d_biases = [d_y.sum(0) if next(wanted) else None for d_y in d_ys]
        return d_x, *d_weights, *d_biases


def weight_gradient(d_y: Tensor, x: Tensor) -> Tensor:
    """d_y^T x, of d_y [tokens, out] and x [tokens, in]."""
    split = split_of(d_y.shape[1], x.shape[1], len(x), processors(x.device))
    if split == 1:
        return d_y.t() @ x
    from argosy.model.ops.kernels.matmul_kernel import sum_parts

    return sum_parts(torch.bmm(d_y.unflatten(0, (split, -1)).transpose(1, 2), x.unflatten(0, (split, -1))))


@cache
def split_of(height: int, width: int, tokens: int, processors: int) -> int:
    """Into how many parts to cut the tokens of a weight's gradient [height, width], so that its tiles fill the GPU: 200 tiles
    on 132 processors take as long as 264 would. Adding the parts up costs something too."""

    def speed(split: int) -> float:
        return max(_filled(height, width, tile, split, processors) for tile in _TILES) * (
            1 - _SUM_COST * split / tokens
        )

    best = max((split for split in (1, 2, 4, 8) if tokens % split == 0), key=speed)
    return best if speed(best) > 1.05 * speed(1) else 1


def _filled(height: int, width: int, tile: tuple[int, int], split: int, processors: int) -> float:
    """Which part of the time and place of all processors goes into the product."""
    tiles = -(-height // tile[0]) * -(-width // tile[1]) * split
    waves = -(-tiles // processors)
    small = _SMALL_TILE if tile[0] * tile[1] <= 128 * 128 else 1.0
    return small * height * width * split / (waves * processors * tile[0] * tile[1])


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Later:
    """What was put off in one backward pass."""

    def __init__(self) -> None:
        self._work: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def put(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        self._work.append((weight, gradient))

    def run(self) -> None:
        for weight, gradient in self._work:
            torch.autograd.backward(weight, gradient())
        self._work = []


_separable = False
_later: Later | None = None


@contextmanager
def separable() -> Iterator[None]:
    """Forward passes in here leave it open when the gradients of weights are computed."""
    global _separable
    _separable = True
    try:
        yield
    finally:
        _separable = False


def is_separable() -> bool:
    return _separable


@contextmanager
def weights_later() -> Iterator[Later]:
    """Backward passes in here put off the gradients of the weights of matrix products."""
    global _later
    _later = Later()
    try:
        yield _later
    finally:
        _later = None


def now_or_later(weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
    """For the backward pass of a product: the gradient, or None where it was put off."""
    if _later is None:
        return gradient()
    _later.put(weight, gradient)
    return None

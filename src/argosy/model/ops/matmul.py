"""Matmuls of one input with one or several weights, such as the gate and up projections of an MLP.

The backward GEMMs accumulate the input's gradient directly. Plain autograd would write one gradient per matmul and add them
afterwards. The gradient GEMM of a small weight is split along the tokens (`split_of`).

Weight gradients can be deferred (`weights_later`). A backward pass needs input gradients at once, because another layer waits
for them, but weight gradients only at the end of a step. A pipeline schedule computes them in its bubbles.

If micro-batches sum the gradients of a 16-bit weight in 32 bits, the GEMM adds to the sum itself. autograd would write the gradient,
copy it to 32 bits and add the copy: with 2,048 tokens, a sixth of the time of a layer.

An input can have a listener (`listen`), which gets its gradient before the gradients of the weights are computed. Tensor parallelism
sums it over ranks meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.compat import add_product, is_summed_wide
from argosy.model.ops.choice import stood_for, use_kernel

# Tile sizes of cuBLAS.
_TILES = ((128, 256), (256, 128), (192, 192), (256, 192), (192, 256), (320, 128), (128, 320), (128, 128))
# The measured speed of the smallest tile, relative to the others.
_SMALL_TILE = 0.85
# In tokens: a GEMM over this many takes as long as reading its result once.
_SUM_COST = 180


def matmuls(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return x weight^T + bias for every weight [out, in], for x [.., in]."""
    if is_separable() or use_kernel(x):
        found: tuple[Tensor, ...] = Products.apply(x, *weights, *biases)
        return found
    if len(weights) == 1:
        return (F.linear(x, weights[0], biases[0]),)
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


class GradientListener(Protocol):
    """Gets the gradient of a tensor from the one matmul that reads it. Another reader would add to the gradient."""

    # Matmuls that read the tensor.
    readers: int

    def hear(self, gradient: Tensor) -> None: ...


_LISTENER = "_argosy_listener"


def listen(x: Tensor, listener: GradientListener) -> None:
    """Give the gradient of x to the listener as soon as the one matmul that reads x has computed it."""
    setattr(x, _LISTENER, listener)


def _listener_of(x: Tensor) -> GradientListener | None:
    found: GradientListener | None = getattr(x, _LISTENER, None)
    if found is not None:
        found.readers += 1
    return found


class Products(torch.autograd.Function):
    """The products of an input with weights, and as many biases or None."""

    @staticmethod
    def keep(ctx: Any, x: Tensor, weights: Sequence[Tensor]) -> None:
        """Keep what the backward pass reads."""
        ctx.listener = _listener_of(x)
        ctx.save_for_backward(x, *weights)
        # The weights themselves: the saved tensors may be copies.
        ctx.weights = weights

    @staticmethod
    def forward(ctx: Any, x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        weights, biases = factors[: len(factors) // 2], factors[len(factors) // 2 :]
        Products.keep(ctx, x, weights)
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
            if ctx.listener is not None and ctx.listener.readers == 1:
                ctx.listener.hear(d_x)
        rows = x.flatten(0, -2)
        d_weights = [
            now_or_later(weight, partial(product, d_y, rows)) if next(wanted) else None
            for weight, d_y in zip(ctx.weights, d_ys, strict=True)
        ]
        d_biases = [d_y.sum(0) if next(wanted) else None for d_y in d_ys]
        return d_x, *d_weights, *d_biases


class GradientOf(Protocol):
    """Computes a gradient: of 32 bits if `wide`, and added to `total`, which has 32 bits and is contiguous, if there is one."""

    def __call__(self, total: Tensor | None = None, *, wide: bool = False) -> Tensor: ...


def product(d_y: Tensor, x: Tensor, total: Tensor | None = None, *, wide: bool = False) -> Tensor:
    """Return d_y^T x as a `GradientOf` does, for d_y [tokens, out] and x [tokens, in]."""
    split = split_of(d_y.shape[1], x.shape[1], len(x), processors(x.device))
    if split == 1:
        return d_y.t() @ x if total is None and not wide else add_product(total, d_y.t(), x)
    from argosy.model.ops.kernels.matmul_kernel import sum_parts

    parts = torch.bmm(d_y.unflatten(0, (split, -1)).transpose(1, 2), x.unflatten(0, (split, -1)))
    return sum_parts(parts, total, wide=wide)


def summed(gradient: Tensor, total: Tensor | None = None, *, wide: bool = False) -> Tensor:
    """Return a gradient as a `GradientOf` does."""
    if total is None:
        return gradient.float() if wide else gradient
    if not (use_kernel(total) and gradient.is_contiguous()):
        return total.add_(gradient)
    from argosy.model.ops.kernels.matmul_kernel import sum_parts

    return sum_parts(gradient[None], total)


@cache
def split_of(height: int, width: int, tokens: int, processors: int) -> int:
    """Return the number of parts to split the tokens of a weight gradient [height, width] into (split-K).

    More parts give more tiles, which fill the GPU better: 200 tiles on 132 multiprocessors take as long as 264. Summing the
    parts has a cost too.
    """

    def speed(split: int) -> float:
        return max(filled(height, width, tile, split, processors) for tile in _TILES) * (1 - _SUM_COST * split / tokens)

    best = max((split for split in (1, 2, 4, 8) if tokens % split == 0), key=speed)
    return best if speed(best) > 1.05 * speed(1) else 1


def filled(height: int, width: int, tile: tuple[int, int], split: int, processors: int) -> float:
    """Return the fraction of the GPU's throughput that a GEMM uses with this tile size and split."""
    tiles = -(-height // tile[0]) * -(-width // tile[1]) * split
    waves = -(-tiles // processors)
    small = _SMALL_TILE if tile[0] * tile[1] <= 128 * 128 else 1.0
    return small * height * width * split / (waves * processors * tile[0] * tile[1])


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, 1 for a CPU."""
    gpu = stood_for(device)
    return _processors(device) if gpu is None else gpu.processors


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Later:
    """The weight gradients deferred in one backward pass."""

    def __init__(self) -> None:
        self._work: list[tuple[Tensor, GradientOf]] = []

    def put(self, weight: Tensor, gradient: GradientOf) -> None:
        self._work.append((weight, gradient))

    @torch.no_grad()
    def run(self) -> None:
        for weight, gradient in self._work:
            found = added(weight, gradient)
            if found is not None:
                torch.autograd.backward(weight, found)
        self._work = []


_separable = False
_later: Later | None = None


@contextmanager
def separable() -> Iterator[None]:
    """Run forward passes whose weight gradients can be deferred."""
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
    """Defer the weight gradients of matmuls in the backward passes inside."""
    global _later
    _later = Later()
    try:
        yield _later
    finally:
        _later = None


def now_or_later(weight: Tensor, gradient: GradientOf) -> Tensor | None:
    """Return a weight's gradient for autograd, or None if it is deferred or was added to the sum. Called in the backward pass of a
    matmul."""
    if _later is None:
        return added(weight, gradient)
    _later.put(weight, gradient)
    return None


def takes_sums(parameter: Tensor, total: Tensor | None) -> bool:
    """Return whether a `GradientOf` may add to the sum of a parameter, of which this process has `total`."""
    return is_summed_wide(parameter) and (total is None or total.is_contiguous())


# The attribute of a tensor that is a part of a parameter: adds a gradient to the parameter's sum, or says that it cannot.
SUM = "_argosy_sum"


def added(weight: Tensor, gradient: GradientOf) -> Tensor | None:
    """Add a gradient to the sum that its weight has. Return it if autograd has to do that.

    Hooks that run after accumulation (`register_post_accumulate_grad_hook`) run all the same: after the weight's last use in the pass."""
    if torch.compiler.is_compiling():
        return gradient()
    elsewhere: Callable[[GradientOf], bool] | None = getattr(weight, SUM, None)
    if elsewhere is not None:
        return None if elsewhere(gradient) else gradient()
    if not takes_sums(weight, weight.grad):
        return gradient()
    weight.grad = gradient(weight.grad, wide=True)
    return None

"""Matmuls in 8-bit floats (fp8).

A tensor is stored as x = scale x values, with one scale per tensor, computed from its current largest magnitude. No scales
are kept between steps, so a resumed run has the same scales. Weights and activations are e4m3 (largest value 448), gradients
e5m2 (largest value 57,344: less precise, wider). With y = x w^T the three matmuls are

    y  = x w^T       x [tokens, in]       w [out, in]           along `in`
    dx = dy w        dy [tokens, out]     w^T [in, out]         along `out`
    dw = dy^T x      dy^T [out, tokens]   x^T [in, tokens]      along `tokens`

and the hardware needs both factors contiguous along the dimension it sums over. Each tensor is therefore stored both plain
and transposed; one pass writes both. Sums are 32-bit. Only the forward matmul may use the faster, slightly less precise
accumulation. On a CPU the same rounding is followed by an ordinary matmul, which the tests run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from argosy.compat import gradient_dtype, scaled_mm
from argosy.model.ops.choice import use_kernel
from argosy.model.ops.largest import ask_update, noted, noted_weights
from argosy.model.ops.matmul import now_or_later

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
T = TypeVar("T")


class Quantised(NamedTuple):
    values: Tensor  # [rows, cols]
    transposed: Tensor  # [cols, rows], contiguous
    # x = scale x values, 32-bit.
    scale: Tensor  # []


def fp8_matmuls(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return x weight^T + bias for every weight [out, in]. x [.., in] is quantised once for all of them."""
    found: tuple[Tensor, ...] = _Fp8Products.apply(x, len(weights), *weights, *biases)
    return found


def quantise(x: Tensor, dtype: torch.dtype, parts: Tensor | None = None) -> Quantised:
    """Return x [.., cols] quantised to 8 bits, as rows [rows, cols] and transposed.

    Args:
        parts: the largest magnitudes of parts of x, if they are known but not noted with it.
    """
    return _quantise([x.flatten(0, -2)], dtype, noted(x) if parts is None else parts)


def is_whole(x: Tensor) -> bool:
    """True if the rows of x [.., cols] are a multiple of 4, as fused operations need them. Their kernels write four rows at a time."""
    return x.numel() // x.shape[-1] % 4 == 0


_kept: dict[tuple[object, ...], Any] | None = None


@contextmanager
def weights_rounded_once() -> Iterator[None]:
    """Quantise each weight once for all passes inside, such as the micro-batches of a step. One changed in place is quantised again."""
    global _kept
    _kept = {}
    try:
        yield
    finally:
        _kept = None


def quantise_weights(*weights: Tensor) -> Quantised:
    """Return weights [.., in] quantised to 8 bits with one scale, one below the other."""
    return once(lambda: _quantise(weights, FORWARD, largest_of_weights(*weights)), *weights)


def largest_of_weights(*weights: Tensor) -> Tensor | None:
    """Return the largest magnitudes of parts of some weights, if their last update noted them, and ask the next update to do so."""
    if _is_repeated(weights[0]) or not use_kernel(weights[0]):
        return None
    for weight in weights:
        ask_update(weight)
    return noted_weights(*weights)


def once(find: Callable[[], T], *weights: Tensor, what: str = "values") -> T:
    """Return what `find` computes from some weights. Inside `weights_rounded_once`, the result of an earlier call is used again.

    Args:
        what: distinguishes the results of different functions of the same weights.
    """
    # A captured graph reads fixed addresses, and may be replayed when nothing is kept any more.
    if _is_repeated(weights[0]) or _kept is None:
        return find()
    key = (what, *((weight.data_ptr(), weight._version, weight.shape) for weight in weights))
    if key not in _kept:
        # With the weights themselves: the memory of one that is freed could be given to another.
        _kept[key] = find(), [weight.detach() for weight in weights]
    found: T = _kept[key][0]
    return found


def _is_repeated(weight: Tensor) -> bool:
    """True if this pass is compiled or captured as a graph, and so runs again when the weights have changed."""
    return torch.compiler.is_compiling() or (weight.is_cuda and torch.cuda.is_current_stream_capturing())


def _quantise(tensors: Sequence[Tensor], dtype: torch.dtype, parts: Tensor | None) -> Quantised:
    if use_kernel(tensors[0]):
        from argosy.model.ops.kernels.fp8_kernel import quantise as fused

        return fused(tensors, dtype, parts)
    x = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
    largest = torch.finfo(dtype).max
    scale = (x.abs().amax().float() / largest).clamp(min=1e-30)
    values = (x.float() * (1 / scale)).clamp(-largest, largest).to(dtype)
    return Quantised(values, values.t().contiguous(), scale)


class _Fp8Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *factors: Any) -> tuple[Tensor, ...]:
        weights, biases = factors[:count], factors[count:]
        x8 = quantise(x, FORWARD)
        saved, found = [x8.transposed, x8.scale], []
        for weight, bias in zip(weights, biases, strict=True):
            w8 = quantise_weights(weight)
            y = scaled_mm(x8.values, w8.values.t(), x8.scale, w8.scale, x.dtype, bias=bias, fast=True)
            found.append(y.unflatten(0, x.shape[:-1]))
            saved += [w8.transposed, w8.scale]
        ctx.save_for_backward(*saved)
        ctx.weights = weights
        ctx.form = (x.shape, [None if bias is None else gradient_dtype(bias) for bias in biases])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x8t, x_scale, *rest = ctx.saved_tensors
        shape, bias_dtypes = ctx.form
        wants_x, _, *wanted = ctx.needs_input_grad
        count = len(ctx.weights)
        d_x = None
        d_weights: list[Tensor | None] = []
        d_biases: list[Tensor | None] = []
        for n, (gradient, weight) in enumerate(zip(gradients, ctx.weights, strict=True)):
            w8t, w_scale = rest[2 * n : 2 * n + 2]
            d_y = gradient.flatten(0, -2)
            if wants_x or wanted[n]:
                d8 = quantise(gradient, GRADIENT)
            if wants_x:
                part = scaled_mm(d8.values, w8t.t(), d8.scale, w_scale, d_y.dtype)
                d_x = part if d_x is None else d_x.add_(part)
            product = None
            if wanted[n]:
                factors = d8.transposed, x8t.t(), d8.scale, x_scale
                product = now_or_later(weight, partial(scaled_product, factors, d_y.dtype))
            d_weights.append(product)
            d_biases.append(d_y.sum(0, dtype=torch.float32).to(bias_dtypes[n]) if wanted[count + n] else None)
        return None if d_x is None else d_x.view(shape), None, *d_weights, *d_biases


def scaled_product(
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    dtype: torch.dtype,
    total: Tensor | None = None,
    *,
    wide: bool = False,
) -> Tensor:
    """Return the product of two factors with their scales, as a `GradientOf` does."""
    found = scaled_mm(*factors, torch.float32 if wide or total is not None else dtype)
    return found if total is None else total.add_(found)

"""The gradient of a weight, now or later. A backward pass needs the gradients of inputs at once, since another layer waits
for them; those of weights are needed only at the end of a step. Whoever puts them off fills with them the time in which a
pipeline has nothing else to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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

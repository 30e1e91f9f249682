"""The sum of a gradient over tokens, found by the kernel that writes the gradient.

It is the gradient of a bias that was added before. A pass of its own would read the whole gradient again.
"""

from __future__ import annotations

from torch import Tensor


def want_sums(x: Tensor) -> None:
    """Ask the operation that reads x to note the sum of its gradient over tokens, if it can."""
    x.argosy_wants_sums = True  # type: ignore[attr-defined]


def wants_sums(x: Tensor) -> bool:
    return hasattr(x, "argosy_wants_sums")


def note_sums(gradient: Tensor, sums: Tensor | None) -> None:
    """Keep a sum with its gradient, if there is one."""
    if sums is not None:
        gradient.argosy_sums = (sums, gradient._version)  # type: ignore[attr-defined]


def noted_sums(gradient: Tensor) -> Tensor | None:
    """Return the sum of a gradient, if its kernel found it and the gradient has not been changed in place since."""
    sums, version = getattr(gradient, "argosy_sums", (None, None))
    return sums if version == gradient._version else None

"""The sum of a gradient over tokens, found by the kernel that writes the gradient.

It is the gradient of a bias that was added before. A pass of its own would read the whole gradient again.
"""

from __future__ import annotations

from torch import Tensor


def want_sums(x: Tensor, columns: int) -> None:
    """Ask the operation that reads x to note a sum of gradients over tokens that has so many columns, if it can."""
    x.argosy_wants_sums = columns  # type: ignore[attr-defined]


def wants_sums(x: Tensor, columns: int) -> bool:
    return getattr(x, "argosy_wants_sums", None) == columns


def note_sums(gradient: Tensor, sums: Tensor | None) -> None:
    """Keep a sum with the gradient of what wanted it, if there is one."""
    if sums is not None:
        gradient.argosy_sums = (sums, gradient._version)  # type: ignore[attr-defined]


def noted_sums(gradient: Tensor) -> Tensor | None:
    """Return the sum that was kept with a gradient, if the gradient has not been changed in place since."""
    sums, version = getattr(gradient, "argosy_sums", (None, None))
    return sums if version == gradient._version else None

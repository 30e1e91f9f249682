"""The largest magnitude in a tensor, found by the kernel that writes the tensor.

Rounding to 8-bit floats needs it before it can begin. A pass of its own would read the whole tensor again.
"""

from __future__ import annotations

from torch import Tensor

# Kernels that find or read maxima do so in at most this many parts.
SLOTS = 1024


def note(x: Tensor, found: Tensor | None) -> None:
    """Keep with x the largest magnitudes of its parts, or bounds of them, that its kernel found, if it did."""
    if found is not None:
        x.argosy_largest = (found, x._version)  # type: ignore[attr-defined]


def noted(x: Tensor) -> Tensor | None:
    """Return the largest magnitudes of parts of x, at most SLOTS, if its kernel found them and x has not been changed in place since."""
    found, version = getattr(x, "argosy_largest", (None, None))
    return found if version == x._version else None


def want(x: Tensor) -> None:
    """Ask the operation that reads x to note the largest magnitudes of its gradient, if it can."""
    x.argosy_wants_largest = True  # type: ignore[attr-defined]


def is_wanted(x: Tensor) -> bool:
    return hasattr(x, "argosy_wants_largest")


def transposed(x: Tensor) -> Tensor:
    """Return x with its second and third dimension exchanged, and what is noted of it."""
    view = x.transpose(1, 2)
    note(view, noted(x))
    return view

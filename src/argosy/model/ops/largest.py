"""The largest magnitude in a tensor, found by the kernel that writes the tensor.

Rounding to 8-bit floats needs it before it can begin. A pass of its own would read the whole tensor again.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Programs of a kernel share this many maxima, so that few wait for the same one.
SLOTS = 1024


def slots(device: torch.device) -> Tensor:
    """Return zeros for a kernel to raise: non-negative 32-bit floats as integers, which compare alike and have an atomic maximum."""
    return torch.zeros(SLOTS, dtype=torch.int32, device=device)


def note(x: Tensor, found: Tensor | None) -> None:
    """Keep with x the maxima that its kernel found, if any."""
    if found is not None:
        x.argosy_largest = (found.view(torch.float32), x._version)  # type: ignore[attr-defined]


def noted(x: Tensor) -> Tensor | None:
    """Return maxima of parts of x [SLOTS] if its kernel found them and x has not been changed in place since."""
    found, version = getattr(x, "argosy_largest", (None, None))
    return found if version == x._version else None

"""The only place that checks torch's version or touches its private names. From here down, torch is imported."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from argosy.errors import ArgosyError

OLDEST_TORCH = (2, 11)

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
    raise ArgosyError(
        "device.old-torch",
        f"torch {torch.__version__} is installed; Argosy needs {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer",
        fix=f"pip install 'torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}'",
    )


def multiply_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply every tensor in place by a 0-dimensional one, in one pass and without a host sync."""
    torch._foreach_mul_(list(tensors), factor)

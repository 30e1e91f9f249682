"""The largest magnitude in a tensor, found by the kernel that writes the tensor.

Rounding to 8-bit floats needs it before it can begin. A pass of its own would read the whole tensor again.

A weight is written by the optimiser's update, which finds its largest magnitudes if the last pass asked for them. Compiled and captured
passes do not ask, and must not read these: they would still read the same memory when the weights have changed. So they are kept apart
from those of other tensors. FSDP's passes read weights that no update wrote, but FSDP gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from argosy.model.ops.token_sums import note_sums, noted_sums

# Kernels that find or read maxima do so in at most this many parts.
SLOTS = 1024
# An update finds those of a weight in so many parts.
WEIGHT_PARTS = 64


def note(x: Tensor, found: Tensor | None) -> None:
    """Keep with x the largest magnitudes of its parts, or bounds of them, that its kernel found, if it did."""
    if found is not None:
        x.argosy_largest = (found, x._version)  # type: ignore[attr-defined]


def noted(x: Tensor) -> Tensor | None:
    """Return the largest magnitudes of parts of x, at most SLOTS, if its kernel found them and x has not been changed in place since."""
    found, version = getattr(x, "argosy_largest", (None, None))
    # torch.compile cannot read the version of a tensor that it makes itself. Of those nothing is noted.
    return None if found is None or version != x._version else found


def want(x: Tensor) -> None:
    """Ask the operation that reads x to note the largest magnitudes of its gradient, if it can."""
    x.argosy_wants_largest = True  # type: ignore[attr-defined]


def is_wanted(x: Tensor) -> bool:
    return hasattr(x, "argosy_wants_largest")


def transposed(x: Tensor) -> Tensor:
    """Return x with its second and third dimension exchanged, and what is noted of it."""
    view = x.transpose(1, 2)
    note(view, noted(x))
    note_sums(view, noted_sums(x))
    return view


def ask_update(weight: Tensor) -> None:
    """Ask the next update of a weight to note its largest magnitudes, if it can."""
    weight.argosy_asks_update = True  # type: ignore[attr-defined]


def asks_update(weight: Tensor) -> bool:
    return getattr(weight, "argosy_asks_update", False)


def note_weight(weight: Tensor, found: Tensor) -> None:
    """Keep with a weight the largest magnitudes of its parts, which its update found. The next update has to be asked again."""
    weight.argosy_weight_largest = (found, *_state(weight))  # type: ignore[attr-defined]
    weight.argosy_asks_update = False  # type: ignore[attr-defined]


def noted_weights(*weights: Tensor) -> Tensor | None:
    """Return the largest magnitudes of parts of some weights, at most SLOTS, if their updates found them and none was changed since."""
    parts: list[Tensor] = []
    for weight in weights:
        found, *state = getattr(weight, "argosy_weight_largest", (None,))
        if found is None or state != _state(weight):
            return None
        parts.append(found)
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if WEIGHT_PARTS * len(parts) <= SLOTS else None


def _state(weight: Tensor) -> list[int]:
    """Return what changes with a weight: how often it was written in place, and where it is, for assignments to `data`."""
    return [weight._version, weight.data_ptr()]

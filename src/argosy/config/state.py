"""What training keeps of each parameter, and what a checkpoint holds of it: the one place that says how many bytes.

A checkpoint holds the weights in 32 bits, whatever precision they are computed in (parameters of fewer bits are rounded from them), and
the optimiser's tensors, 32-bit and shaped like the parameter. AdamW keeps two of them, 12 bytes a parameter in all; Muon one for the
matrices inside the layers, 8 bytes, and leaves the rest to AdamW. What no gradient trains has no state.
"""

from __future__ import annotations

from argosy.config.counts import count_parameters
from argosy.config.model import ModelSpec

WIDE = 4  # bytes of a 32-bit number
STATE: dict[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}  # tensors a rule keeps


def state_bytes(rule: str) -> int:
    """Bytes of the optimiser's own tensors for a parameter that this rule updates."""
    return WIDE * len(STATE[rule])


def checkpoint_bytes(model: ModelSpec, optimizer: str = "adamw") -> int:
    """Bytes of the tensors of one checkpoint; its headers and index are small beside them."""
    count = count_parameters(model)
    matrices = count.matrices if optimizer == "muon" else 0
    rest = count.total - count.fixed - matrices
    return WIDE * count.total + state_bytes("muon") * matrices + state_bytes("adamw") * rest


def least_state_bytes(model: ModelSpec, optimizer: str = "adamw") -> int:
    """Bytes of weights, gradients and optimiser that all ranks of one replica keep at least, in any precision: a 32-bit parameter is its
    own master and has a 32-bit gradient, and a 16-bit one has as many bytes in its copy and gradient together."""
    return checkpoint_bytes(model, optimizer) + WIDE * count_parameters(model).total

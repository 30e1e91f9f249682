"""Bytes per parameter of weights and optimiser state, in training and in a checkpoint. No other module defines these numbers.

A checkpoint holds fp32 master weights, whatever the training precision is (16-bit parameters are rounded from them), and the
optimiser state, fp32 tensors with the shape of the parameter. AdamW keeps two of them: 12 bytes per parameter in all. Muon keeps
one for the matrices inside the layers: 8 bytes. AdamW updates the other parameters. Untrained buffers have no optimiser state.
"""

from __future__ import annotations

from argosy.config.counts import count_parameters
from argosy.config.model import ModelSpec

WIDE = 4  # bytes of an fp32 number
# The optimiser state tensors of each rule.
STATE: dict[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}


def state_bytes(rule: str) -> int:
    """Bytes of optimiser state per parameter that this rule updates."""
    return WIDE * len(STATE[rule])


def checkpoint_bytes(model: ModelSpec, optimizer: str = "adamw") -> int:
    """Bytes of the tensors of one checkpoint. Headers and index are negligible."""
    count = count_parameters(model)
    matrices = count.matrices if optimizer == "muon" else 0
    rest = count.total - count.fixed - matrices
    return WIDE * count.total + state_bytes("muon") * matrices + state_bytes("adamw") * rest


def least_state_bytes(model: ModelSpec, optimizer: str = "adamw") -> int:
    """Bytes of weights, gradients and optimiser state that the ranks of one replica hold at least, in any precision.

    An fp32 parameter is its own master weight and has an fp32 gradient. A 16-bit parameter has the same number of bytes in its
    16-bit copy and gradient together.
    """
    return checkpoint_bytes(model, optimizer) + WIDE * count_parameters(model).total

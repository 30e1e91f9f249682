"""Muon: momentum whose direction is orthogonalised by Newton-Schulz iterations, for the matrices inside the layers.

The planner's cost model: every rank orthogonalises whole matrices. The shards are all-gathered first, over the ranks that shard the
state and the tensor-parallel ranks, and each of these ranks computes the same update. A rank updates only the experts it holds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from argosy.config.model import Section
from argosy.config.optimizer_rule import PlannedRank, Rule
from argosy.config.optimizers.adamw import RULE as ADAMW
from argosy.config.units import Fraction, NotBool

# Bytes per element of the gathered direction.
_GATHERED = 4
# Bytes per element of a matrix: gradient, direction, result and scaled change in 32 bits, two copies in 16 bits.
_WORKING = 20


class MuonSpec(Section):
    """Muon, for the matrices inside the layers; everything else is AdamW's, with the keys beside this section."""

    momentum: Fraction = Field(0.95, description="share of the momentum that is kept at each step")
    nesterov: bool = Field(True, description="look ahead by one step")
    ns_steps: Annotated[int, Field(ge=1, le=99), NotBool] = Field(5, description="Newton-Schulz iterations")
    lr_scaling: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="the learning rate times 0.2 sqrt(max(out, in)), so that AdamW's serves; or times sqrt(max(1, out / in))",
    )


def newton_schulz_seconds(rank: PlannedRank, rows: float, columns: float, steps: int) -> float:
    """Return the seconds to orthogonalise one matrix X. Each iteration computes X X^T, its square, and the product with X."""
    short, long = sorted((rows, columns))
    matmul = rank.matmul_seconds
    return steps * (matmul(short, short, long) + matmul(short, short, short) + matmul(short, long, short))


def _extra_seconds(keys: MuonSpec, rank: PlannedRank) -> float:
    compute = sum(
        count * newton_schulz_seconds(rank, rows, columns, keys.ns_steps) for rows, columns, count in rank.matrices
    )
    return rank.layers * (compute + rank.gather_seconds(_GATHERED))


def _working_bytes(largest_matrix: float) -> float:
    return _WORKING * largest_matrix


RULE = Rule(
    name="muon",
    title="Muon",
    keys=MuonSpec,
    state={"momentum": "fp32"},
    keeps="momentum",
    rest=ADAMW,
    # Muon has one state tensor less than AdamW, but writes and reads a direction.
    bytes_moved=ADAMW.bytes_moved,
    working_bytes=_working_bytes,
    extra_seconds=_extra_seconds,
    extra_formula="Newton-Schulz products of whole matrices, and their gathers",
    names_elsewhere={"megatron": ("muon",)},
)

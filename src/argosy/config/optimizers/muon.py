"""Muon: momentum whose direction is orthogonalised by Newton-Schulz iterations, for the matrices inside the layers.

Its cost to the planner: every rank orthogonalises whole matrices. Their shards are gathered first, over the ranks that shard the
state and those of tensor parallelism, and each of these computes the same. Of stacked experts a rank does those it holds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from argosy.config.model import Section
from argosy.config.optimizer_rule import PlannedRank, Rule
from argosy.config.optimizers.adamw import RULE as ADAMW
from argosy.config.units import Fraction, NotBool

_GATHERED = 4  # bytes of a number of the direction
_WORKING = 20  # bytes of a matrix's number: gradient, direction and result in 32 bits, two copies in 16


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
    """Seconds to orthogonalise one matrix X: each iteration multiplies X X^T, its square, and that square by X."""
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
    # One state tensor less than AdamW, and a direction that is written and read.
    bytes_moved=ADAMW.bytes_moved,
    working_bytes=_working_bytes,
    extra_seconds=_extra_seconds,
    extra_formula="Newton-Schulz products of whole matrices, and their gathers",
    names_elsewhere={"megatron": ("muon",)},
)

"""AdamW: two moments of the gradient and decoupled weight decay. It is the default, and the rule others use for embeddings and norms."""

from __future__ import annotations

from pydantic import Field

from argosy.config.model import Section
from argosy.config.optimizer_rule import Rule
from argosy.config.units import Fraction, PositiveNumber


class AdamWSpec(Section):
    """AdamW's keys, which stand in `optim` itself."""

    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="Adam's decay rates")
    eps: PositiveNumber = Field(1e-8, description="Adam's epsilon")


RULE = Rule(
    name="adamw",
    title="AdamW",
    keys=AdamWSpec,
    inline=True,
    state={"exp_avg": "fp32", "exp_avg_sq": "fp32"},
    keeps="moments",
    # The gradient is read twice (norm, update), master and moments are read and written, and the 16-bit weight is written.
    bytes_moved=2 * 4 + 2 * 4 + 2 * 8 + 2,
    names_elsewhere={"megatron": ("adam",), "foundry": ("decoupled_adamw", "adamw")},
)

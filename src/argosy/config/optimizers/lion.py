"""Lion: every weight moves by the learning rate, in the direction of the sign of an interpolated momentum (arXiv 2302.06675)."""

from __future__ import annotations

from pydantic import Field

from argosy.config.model import Section
from argosy.config.optimizer_rule import Rule
from argosy.config.units import Fraction


class LionSpec(Section):
    """Lion, for all parameters. It wants a learning rate 3 to 10 times below AdamW's, and as much more weight decay."""

    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.99), description="share of the momentum in the direction of an update, and share of it that is kept"
    )


RULE = Rule(
    name="lion",
    title="Lion",
    keys=LionSpec,
    state={"exp_avg": "fp32"},
    keeps="momentum",
    # The gradient is read twice (norm, update), master and momentum are read and written, and the 16-bit weight is written.
    bytes_moved=2 * 4 + 2 * 4 + 2 * 4 + 2,
    names_elsewhere={"foundry": ("decoupled_lionw",)},
)

"""What training keeps of each parameter, and what a checkpoint holds of it, in bytes.

A checkpoint holds the weights in 32 bits, whatever precision they are computed in (parameters of fewer bits are rounded from them), and
the optimiser's state tensors, which its `Rule` declares: two with AdamW, 12 bytes a parameter in all. A parameter that no gradient trains
has no state.
"""

from __future__ import annotations

from argosy.config.counts import count_parameters
from argosy.config.model import ModelSpec
from argosy.config.optimizer_rule import Rule
from argosy.config.optimizers import DEFAULT

WIDE = 4  # bytes of a 32-bit number


def checkpoint_bytes(model: ModelSpec, rule: Rule = DEFAULT) -> int:
    """Bytes of the tensors of one checkpoint; its headers and index are small beside them."""
    count = count_parameters(model)
    others = count.total - count.fixed - count.matrices
    state = sum(part.state_bytes * int(number) for part, number in rule.shares(count.matrices, others))
    return WIDE * count.total + state


def least_state_bytes(model: ModelSpec, rule: Rule = DEFAULT) -> int:
    """Bytes of weights, gradients and optimiser that all ranks of one replica keep at least, in any precision: a 32-bit parameter is its
    own master and has a 32-bit gradient, and a 16-bit one has as many bytes in its copy and gradient together."""
    return checkpoint_bytes(model, rule) + WIDE * count_parameters(model).total

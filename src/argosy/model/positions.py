"""How order is encoded, and what every block of one forward pass shares because of it.

Rotary tables and ALiBi slopes are computed from the positions in each forward pass: nothing is stored in the model, so
nothing has to be saved, moved or sharded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.config.model import ModelSpec
from argosy.model.attention import Attend, Mask, prepare_attention
from argosy.model.ops.heads import Rope


@dataclass(frozen=True)
class Context:
    """What every block needs to know about this forward pass."""

    rope: Rope | None
    attend: Attend
    scale: Tensor | float = 1.0  # of the loss, for what a block adds to it


def make_context(
    spec: ModelSpec,
    x: Tensor,
    *,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    training: bool = False,
    scale: Tensor | float = 1.0,
) -> Context:
    """For the embedded tokens x [batch, seq, hidden]. `positions` [batch, seq] restart where documents do."""
    seq, device = x.shape[1], x.device
    rope = None
    if spec.positions == "rope":
        where = torch.arange(seq, device=device)[None] if positions is None else positions
        rope = rope_tables(where, spec.head_dim, spec.rope_theta)
    mask = Mask(
        causal=spec.architecture == "decoder",
        window=spec.window,
        slopes=alibi_slopes(spec.heads, device) if spec.positions == "alibi" else None,
        documents=documents,
    )
    attend = prepare_attention(mask, x, spec.head_dim, dropout=spec.dropout if training else 0.0)
    return Context(rope, attend, scale)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> Rope:
    """cos and sin of position x frequency, for positions [1 or batch, seq]."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[:, :, None].float() * frequencies
    return angles.cos(), angles.sin()


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """The geometric slopes 2^(-8 i / heads). For a head count that is no power of two, those of the next power of two,
    every second one first."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** (-8.0 / power * torch.arange(1, power + 1, device=device, dtype=torch.float32))
    return slopes if power == heads else torch.cat((slopes[1::2], slopes[::2]))[:heads]

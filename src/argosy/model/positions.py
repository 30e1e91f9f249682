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

Rope = tuple[Tensor, Tensor]  # cos and sin, [1 or batch, 1, seq, head_dim]


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
        cos, sin = rope_tables(where, spec.head_dim, spec.rope_theta)
        rope = (cos.to(x.dtype), sin.to(x.dtype))
    mask = Mask(
        causal=spec.architecture == "decoder",
        window=spec.window,
        slopes=alibi_slopes(spec.heads, device) if spec.positions == "alibi" else None,
        documents=documents,
    )
    attend = prepare_attention(mask, seq, device, x.dtype, dropout=spec.dropout if training else 0.0)
    return Context(rope, attend, scale)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> Rope:
    """cos and sin of position x frequency, each frequency twice, for the rotate-half convention.

    positions [1 or batch, seq] -> [1 or batch, 1, seq, head_dim]
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of x [batch, heads, seq, head_dim]."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """The geometric slopes 2^(-8 i / heads). For a head count that is no power of two, those of the next power of two,
    every second one first."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** (-8.0 / power * torch.arange(1, power + 1, device=device, dtype=torch.float32))
    return slopes if power == heads else torch.cat((slopes[1::2], slopes[::2]))[:heads]

"""How order is encoded: rotary tables, and additive biases for ALiBi and sliding windows.

All are computed from the positions in each forward pass: nothing is stored in the model, so nothing has to be saved,
moved or sharded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.config.model import ModelSpec


@dataclass(frozen=True)
class Context:
    """What every block needs to know about the positions of this forward pass."""

    rope: tuple[Tensor, Tensor] | None  # cos and sin, [seq, head_dim]
    bias: Tensor | None  # added to attention scores, [1, heads or 1, seq, seq]; None: plain causal


def make_context(spec: ModelSpec, seq: int, device: torch.device, dtype: torch.dtype) -> Context:
    rope = None
    if spec.positions == "rope":
        cos, sin = rope_tables(seq, spec.head_dim, spec.rope_theta, device)
        rope = (cos.to(dtype), sin.to(dtype))
    alibi = spec.positions == "alibi"
    windowed = spec.window is not None and spec.window < seq
    if not alibi and not windowed:
        return Context(rope, None)
    distance = torch.arange(seq, device=device)[:, None] - torch.arange(seq, device=device)[None, :]  # query - key
    bias = torch.zeros(1, 1, seq, seq, device=device)
    if alibi:
        bias = -alibi_slopes(spec.heads, device)[None, :, None, None] * distance
    hidden = distance < 0
    if spec.window is not None:
        hidden = hidden | (distance >= spec.window)
    return Context(rope, bias.masked_fill(hidden, -math.inf).to(dtype))


def rope_tables(seq: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, each frequency twice, for the rotate-half convention. [seq, head_dim]"""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(seq, device=device, dtype=torch.float32)[:, None] * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
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

"""Sharding declarations: how a module's parameters are cut over ranks, and which share of a whole this rank has.

A module class lists in `tensor_parallel` its own parameters and those of its children, with what happens to each when its
matmuls are cut over ranks. A name is that of a parameter (`out.weight`), or of a child for all parameters in it (`q_norm`).
A layout refuses a model with an undeclared parameter: its gradient would silently not be summed.

Attention, MLP and experts are the tensor-parallel region of a block: column-parallel matmuls on the way in, row-parallel ones
on the way out. Inside, a rank has all tokens and a part of the heads or of the inner width. Outside, it has all of the
residual stream or, with sequence parallelism, its share of the tokens.

A model is whole unless `argosy.parallel` shards it. The forward pass needs its `Share` in two places only: for values that
differ from head to head without being weights (ALiBi's slopes), and for random draws. `Dropout` draws its mask for the whole
tensor and uses this rank's share of it, so that every layout drops what a single process would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Sharding(NamedTuple):
    """The sharding of one parameter: cut along `dim`, or whole on every rank.

    `partial` says when a rank's gradient of a whole parameter is only its part of a sum over ranks: `always`, only with
    `sequence` parallelism, or `never`.
    """

    dim: int | None = None
    partial: Literal["always", "sequence", "never"] = "never"


Declaration = Mapping[str, Sharding]

# A matmul's output features: the rows of its weight, and its bias.
COLUMN = Sharding(dim=0)
# A matmul's input features. Its bias is added after the sum over ranks, so it is outside of the region.
ROW = Sharding(dim=1)
# Entries of the vocabulary: the rows of the matrix.
VOCABULARY = Sharding(dim=0)
# Whole, inside the region: used with some of the heads or a part of every expert.
INSIDE = Sharding(partial="always")
# Whole, outside of the region: with sequence parallelism, used with some of the tokens.
OUTSIDE = Sharding(partial="sequence")
# Whole, and used with all tokens on every rank.
REPLICATED = Sharding()


def column(layer: str) -> Declaration:
    """Declare a linear layer, and its adapters, whose output features are cut over ranks."""
    return {layer: COLUMN, f"{layer}.lora_a": INSIDE}


def row(layer: str) -> Declaration:
    """Declare a linear layer, and its adapters, whose input features are cut over ranks."""
    inside = dict.fromkeys((f"{layer}.lora_b", f"{layer}.lora_magnitude"), INSIDE)
    return {f"{layer}.weight": ROW, f"{layer}.lora_a": ROW, f"{layer}.bias": OUTSIDE, **inside}


def shardable(name: str) -> Any:
    """Return a property for a parameter that a layout may shard. Reading it gives this rank's part as a plain tensor."""

    def read(module: nn.Module) -> Tensor | None:
        try:
            parameter = module._parameters[name]
        except KeyError:
            raise AttributeError(f"{type(module).__name__} has no parameter {name!r} yet") from None
        local: Callable[[nn.Parameter], Tensor] | None = module.__dict__.get(LOCAL)
        return parameter if local is None or parameter is None else local(parameter)

    return property(read, lambda module, value: module.register_parameter(name, value))


# The attribute in which a layout stores the function that maps a module's parameter to this rank's part of it.
LOCAL = "_local_part"


@dataclass(frozen=True)
class Share:
    """A share of something cut into `of` equal pieces: the numbers of this rank's `pieces`, in the order it stores them."""

    pieces: tuple[int, ...] = (0,)
    of: int = 1

    @property
    def is_whole(self) -> bool:
        return self.of == 1

    def size_of_whole(self, size: int) -> int:
        """Return the length of the whole, given the length of this share."""
        return size * self.of // len(self.pieces)

    def size_of(self, whole: int) -> int:
        """Return the length of this share, given the length of the whole."""
        return whole * len(self.pieces) // self.of

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return this share of a tensor along `dim`: a copy, or the tensor itself if the share is the whole."""
        if self.is_whole:
            return whole
        pieces = whole.chunk(self.of, dim)
        return torch.cat([pieces[piece] for piece in self.pieces], dim)

    def inside(self, outer: Share) -> Share:
        """Return this share of another share, as a share of the whole."""
        fine = [piece * self.of + part for piece in outer.pieces for part in range(self.of)]
        each = len(outer.pieces)
        chosen = [fine[place * each + n] for place in self.pieces for n in range(each)]
        return Share(tuple(chosen), outer.of * self.of)


WHOLE = Share()


class Dropout(nn.Module):
    """Dropout on activations [batch, seq, ..], active only while training."""

    # This rank's share of the sequence. `argosy.parallel` sets it.
    share: Share = WHOLE

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @property
    def active(self) -> bool:
        return self.training and self.rate > 0

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.rate, {1: self.share}) if self.active else x


class Noise(Dropout):
    """NEFTune: uniform noise on embeddings [batch, seq, hidden], of at most rate / sqrt(seq x hidden), only while training.

    It is a kind of dropout to layouts: seeded in the same way, and drawn for the whole sequence.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.active:
            return x
        batch, seq, hidden = x.shape
        whole = self.share.size_of_whole(seq)
        noise = x.new_empty(batch, whole, hidden).uniform_(-1.0, 1.0)
        return torch.add(x, self.share.take(noise, 1), alpha=self.rate / (whole * hidden) ** 0.5)


def drop(x: Tensor, rate: float, shares: dict[int, Share]) -> Tensor:
    """Apply dropout to x, which is a share along the dimensions in `shares`, as a single process would to the whole."""
    cut = {dim: share for dim, share in shares.items() if not share.is_whole}
    if not cut:
        return F.dropout(x, rate)
    shape = [cut[dim].size_of_whole(size) if dim in cut else size for dim, size in enumerate(x.shape)]
    mask = F.dropout(x.new_ones(shape), rate)
    for dim, share in cut.items():
        mask = share.take(mask, dim)
    return x * mask

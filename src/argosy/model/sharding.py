"""How a model may be spread over ranks: what its modules declare of their parameters, and which pieces of a whole this process has.

A module class names in `tensor_parallel` its own parameters and those of its children, and what becomes of each when its matmuls
are cut over ranks. A name may be that of a parameter (`out.weight`) or of a child, for all parameters in it (`q_norm`). A layout
refuses a model with a parameter that nothing declares: its gradient would silently not be summed.

Attention, MLP and experts are the tensor-parallel region of a block: column-parallel matmuls on the way in, row-parallel ones on
the way out. Inside, a rank has all tokens and a part of the heads or of the inner width. Outside, it has all of the residual
stream or, with sequence parallelism, its share of the tokens.

A model is whole unless `argosy.parallel` says otherwise. Its forward pass has to know its `Share` in two places only: what differs
from head to head without being a weight (ALiBi's slopes), and what is drawn at random. `Dropout` draws its mask for the whole and
uses this process's share of it, so that it is that of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Sharding(NamedTuple):
    """What becomes of one parameter: cut along `dim`, or whole on every rank. The gradient of a whole one is this rank's part of
    a sum over ranks `always`, only with `sequence` parallelism, or `never`."""

    dim: int | None = None
    partial: Literal["always", "sequence", "never"] = "never"


Declaration = Mapping[str, Sharding]

# A matmul's output features, rows of its weight; with its bias.
COLUMN = Sharding(dim=0)
# A matmul's input features. Its bias is added after the sum over ranks, and so is outside of the region.
ROW = Sharding(dim=1)
# Entries of the vocabulary, rows of the matrix.
VOCABULARY = Sharding(dim=0)
# Whole, inside the region: used with some of the heads or a part of every expert.
INSIDE = Sharding(partial="always")
# Whole, outside of the region: with sequence parallelism used with some of the tokens.
OUTSIDE = Sharding(partial="sequence")
# Whole, and used with all tokens on every rank alike.
REPLICATED = Sharding()


def shardable(name: str) -> Any:
    """The attribute of a parameter that a layout may shard: reading it gives what this rank computes with, a plain tensor."""

    def read(module: nn.Module) -> Tensor | None:
        try:
            parameter = module._parameters[name]
        except KeyError:
            raise AttributeError(f"{type(module).__name__} has no parameter {name!r} yet") from None
        local: Callable[[nn.Parameter], Tensor] | None = module.__dict__.get(LOCAL)
        return parameter if local is None or parameter is None else local(parameter)

    return property(read, lambda module, value: module.register_parameter(name, value))


# The attribute in which a layout puts the function from a parameter of a module to this rank's part of it.
LOCAL = "_local_part"


@dataclass(frozen=True)
class Share:
    """`pieces` of the `of` equal pieces something is cut into, in the order they lie in here."""

    pieces: tuple[int, ...] = (0,)
    of: int = 1

    @property
    def is_whole(self) -> bool:
        return self.of == 1

    def size_of_whole(self, size: int) -> int:
        """How long the whole is, of which `size` is this share."""
        return size * self.of // len(self.pieces)

    def size_of(self, whole: int) -> int:
        """How long this share of `whole` is."""
        return whole * len(self.pieces) // self.of

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This share of a tensor, a copy unless it is all of it."""
        if self.is_whole:
            return whole
        pieces = whole.chunk(self.of, dim)
        return torch.cat([pieces[piece] for piece in self.pieces], dim)

    def inside(self, outer: Share) -> Share:
        """This share of what is itself a share."""
        fine = [piece * self.of + part for piece in outer.pieces for part in range(self.of)]
        each = len(outer.pieces)
        chosen = [fine[place * each + n] for place in self.pieces for n in range(each)]
        return Share(tuple(chosen), outer.of * self.of)


WHOLE = Share()


class Dropout(nn.Module):
    """On activations [batch, seq, ..], while training."""

    share: Share = WHOLE  # of the sequence; set by `argosy.parallel`

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @property
    def active(self) -> bool:
        return self.training and self.rate > 0

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.rate, {1: self.share}) if self.active else x


def drop(x: Tensor, rate: float, shares: dict[int, Share]) -> Tensor:
    """Drop from x, which along some dimensions is a share, what one process would drop there."""
    cut = {dim: share for dim, share in shares.items() if not share.is_whole}
    if not cut:
        return F.dropout(x, rate)
    shape = [cut[dim].size_of_whole(size) if dim in cut else size for dim, size in enumerate(x.shape)]
    mask = F.dropout(x.new_ones(shape), rate)
    for dim, share in cut.items():
        mask = share.take(mask, dim)
    return x * mask

"""Which pieces of a whole this process has, where a layout spreads the tokens or the heads of a model over several.

A model is whole unless `argosy.parallel` says otherwise. It has to know its share in two places only: what differs from head
to head without being a weight (ALiBi's slopes), and what is drawn at random, which is drawn for the whole, so that
dropout is that of one process.

`Dropout` does not depend on the layout: the mask is drawn for the whole, and this process's share of it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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

"""Dropout that does not depend on the layout: the mask is drawn for the whole, and this process's share of it is used."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from argosy.model.share import WHOLE, Share


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

"""The tensor-parallel region: the collectives by which activations enter and leave the sharded part of a block.

Between blocks a rank has the residual stream: all of it or, with sequence parallelism, its share of the tokens. Inside
attention and MLP it has all tokens and a part of the heads or of the inner width. On entry the tokens are all-gathered. On exit
the outputs are summed over ranks. Each collective has the one that its gradient needs: all ranks that read a value contribute to
its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.compat import gather_into, passed_on, scatter_sum_into
from argosy.model.sharding import WHOLE, Share


@dataclass(frozen=True)
class Region:
    """The ranks that share the sharded parts of each block, and the collectives on entry and exit."""

    group: dist.ProcessGroup
    # Sequence parallelism: tokens are spread over the ranks outside of the region.
    sequence: bool

    @property
    def ranks(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def share(self) -> Share:
        """This rank's share of what is sharded, such as heads."""
        return Share((self.rank,), self.ranks)

    @property
    def tokens(self) -> Share:
        """This rank's share of the tokens outside of the region."""
        return self.share if self.sequence else WHOLE

    def enter(self, x: Tensor) -> Tensor:
        """Return all tokens of x [batch, seq, ..], for ranks that each compute a part with them."""
        entered: Tensor = (_GatherTokens if self.sequence else _Copy).apply(x, self.group)
        return entered

    def leave(self, y: Tensor) -> Tensor:
        """Sum the outputs of all ranks: all-reduce, or with sequence parallelism reduce-scatter to each rank's tokens."""
        left: Tensor = (_SumToShares if self.sequence else _Sum).apply(y, self.group)
        return left

    def end(self, x: Tensor) -> Tensor:
        """Return all tokens of x, for ranks that all compute the same from there on."""
        ended: Tensor = _Join.apply(x, self.group) if self.sequence else x
        return ended


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return passed_on(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return summed(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return summed_to_shares(gradients[0], ctx.group), None


class _SumToShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return summed_to_shares(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gathered(gradients[0], ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].chunk(ctx.group.size(), 1)[ctx.group.rank()], None


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather tokens: [batch, seq / ranks, ..] of every rank -> [batch, seq, ..]."""
    parts = x.new_empty(group.size(), *x.shape)
    gather_into(parts.flatten(0, 1), x.contiguous(), group)
    return parts.transpose(0, 1).flatten(1, 2)


def summed_to_shares(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter tokens: [batch, seq, ..] -> this rank's tokens of the sum over ranks, [batch, seq / ranks, ..]."""
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    share = torch.empty_like(parts[0])
    scatter_sum_into(share, parts.flatten(0, 1), group)
    return share

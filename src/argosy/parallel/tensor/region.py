"""The tensor-parallel region: the collectives by which activations enter and leave the sharded part of a block.

Between blocks a rank has the residual stream: all of it or, with sequence parallelism, its share of the tokens. Inside
attention and MLP it has all tokens and a part of the heads or of the inner width. On entry the tokens are all-gathered. On exit
the outputs are summed over ranks. Each collective has the one that its gradient needs: all ranks that read a value contribute to
its gradient. In the backward pass, the sum on the way out runs beside the weight gradients of the first matmuls (`EarlySum`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.compat import filled, gather_into, passed_on, scatter_sum_into
from argosy.model.ops.matmul import listen
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

    def enter(self, x: Tensor, *, read_once: bool = True) -> Tensor:
        """Return all tokens of x [batch, seq, ..], for ranks that each compute a part with them. With `read_once`, a matmul may be
        their only reader."""
        # What is compiled does not call the listener.
        early = EarlySum(self) if read_once and not torch.compiler.is_compiling() else None
        entered: Tensor = (_GatherTokens if self.sequence else _Copy).apply(x, self.group, early)
        if early is not None:
            listen(entered, early)
        return entered

    def leave(self, y: Tensor) -> Tensor:
        """Sum the outputs of all ranks: all-reduce, or with sequence parallelism reduce-scatter to each rank's tokens."""
        left: Tensor = (_SumToShares if self.sequence else _Sum).apply(y, self.group)
        return left

    def end(self, x: Tensor) -> Tensor:
        """Return all tokens of x, for ranks that all compute the same from there on."""
        ended: Tensor = _Join.apply(x, self.group) if self.sequence else x
        return ended


class EarlySum:
    """The sum over ranks of the gradient of a region's input, launched before the gradients of the first weights are computed.

    The sum runs beside these matmuls. If more than one matmul reads the input, nothing is launched early.
    """

    def __init__(self, region: Region) -> None:
        self.readers = 0
        self._region = region
        # The gradient, its version, what is being summed, the result, and the handle.
        self._launched: tuple[Tensor, int, Tensor, Tensor, Any] | None = None

    def hear(self, gradient: Tensor) -> None:
        group = self._region.group
        if self._region.sequence:
            sent = by_share(gradient, group)
            result = torch.empty_like(sent[0])
            work = scatter_sum_into(result, sent.flatten(0, 1), group, async_op=True)
        else:
            sent = result = gradient.clone(memory_format=torch.contiguous_format)
            work = dist.all_reduce(result, group=group, async_op=True)
        self._launched = gradient, gradient._version, sent, result, work

    def take(self, gradient: Tensor) -> Tensor | None:
        """Return the sum of the gradient if it was launched, and wait for it. The host waits for gloo only."""
        if self._launched is None:
            return None
        (heard, version, _, result, work), self._launched = self._launched, None
        work.wait()
        # An input with another reader has another gradient.
        same = gradient.data_ptr() == heard.data_ptr() and gradient.shape == heard.shape and version == heard._version
        return result if same else None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, early: EarlySum | None) -> Tensor:
        ctx.group, ctx.early = group, early
        return passed_on(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        early = None if ctx.early is None else ctx.early.take(gradients[0])
        return summed(gradients[0], ctx.group) if early is None else early, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, early: EarlySum | None) -> Tensor:
        ctx.group, ctx.early = group, early
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        early = None if ctx.early is None else ctx.early.take(gradients[0])
        return summed_to_shares(gradients[0], ctx.group) if early is None else early, None, None


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
    return filled(total)


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather tokens: [batch, seq / ranks, ..] of every rank -> [batch, seq, ..]."""
    parts = x.new_empty(group.size(), *x.shape)
    gather_into(parts.flatten(0, 1), x.contiguous(), group)
    return parts.transpose(0, 1).flatten(1, 2)


def summed_to_shares(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter tokens: [batch, seq, ..] -> this rank's tokens of the sum over ranks, [batch, seq / ranks, ..]."""
    parts = by_share(x, group)
    share = torch.empty_like(parts[0])
    scatter_sum_into(share, parts.flatten(0, 1), group)
    return filled(share)


def by_share(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return tokens by the rank that has them: [batch, seq, ..] -> [ranks, batch, seq / ranks, ..]."""
    by_rank: Tensor = x.unflatten(1, (group.size(), -1))
    return by_rank.transpose(0, 1).contiguous()

"""Vocabulary parallelism: the rows of the embedding and of the output head are sharded over ranks, with the loss.

A rank has a contiguous range of vocabulary rows; the last rank may have fewer. Padding exists only inside the loss's GEMMs. The rank that has a token's
row looks it up, and the sum over ranks is the token's vector. For the loss each rank computes the logits of its range only, a few
rows of the batch at a time. It reduces them to their log-sum-exp and, if it has the label, the logit of the label. Only these two
numbers per token are exchanged. They give each rank the loss and the gradient of its own logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.compat import gather_into
from argosy.config.model import ModelSpec
from argosy.model.layers import embed
from argosy.model.objective import Output
from argosy.model.ops.cross_entropy import joined_losses_, linear_cross_entropy, row_parts
from argosy.parallel.tensor.region import Region, gathered


@dataclass(frozen=True)
class Rows:
    """The rows of a vocabulary of `size` that this rank has. `most` is the largest number of rows on any rank."""

    first: int
    most: int
    size: int

    @staticmethod
    def of(size: int, region: Region) -> Rows:
        most = -(-size // region.ranks)
        return Rows(region.rank * most, most, size)


def look_up(embedding: nn.Embedding, region: Region, tokens: Tensor) -> Tensor:
    """Return the vectors of all tokens [batch, seq], whichever rank has their rows."""
    weight = embedding.weight
    row = tokens - Rows.of(embedding.num_embeddings, region).first
    elsewhere = (row < 0) | (row >= weight.shape[0])
    vectors = embed(row.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0)
    return region.leave(vectors)


class SpreadOutput(Output):
    """The output head with a sharded vocabulary. With `alike`, `x` has all tokens on every rank; otherwise those outside of the
    region."""

    def __init__(self, spec: ModelSpec, region: Region, *, alike: bool) -> None:
        super().__init__(spec)
        self._rows, self._region = Rows.of(spec.vocab_size, region), region
        self._way_in = Region(region.group, region.sequence and not alike)

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, at: Tensor | None = None) -> Tensor:
        x = self.wanted(self._way_in.enter(x), at)
        missing = self._rows.most - weight.shape[0]
        ours = F.pad(F.linear(x, weight, bias), (0, missing)).movedim(-1, 1)
        return gathered(ours, self._region.group).movedim(1, -1)[..., : self._rows.size]

    def losses(
        self, x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(
            self._way_in.enter(x).flatten(0, 1), weight, labels.flatten(), bias=bias, z_loss=z_loss,
            rows_to_losses=partial(softmax_loss_, self._rows.first, self._region.group), width=self._rows.most,
            multiple=self.multiple,
        )  # fmt: skip


def softmax_loss_(
    first: int, group: dist.ProcessGroup, logits: Tensor, labels: Tensor, z_loss: float, with_gradient: bool, vocab: int
) -> tuple[Tensor, Tensor]:
    """Compute `argosy.model.ops.cross_entropy.softmax_loss_` from the logits of this rank's columns, which begin at `first`."""
    ours = row_parts(logits, labels, vocab, first)
    every = ours.new_empty(group.size(), *ours.shape)
    gather_into(every.flatten(0, 1), ours, group)
    return joined_losses_(logits, labels, every, z_loss, with_gradient, vocab, first)

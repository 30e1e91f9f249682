"""Vocabulary parallelism: the rows of the embedding and of the output head are sharded over ranks, with the loss.

A rank has a contiguous range of vocabulary rows; the last rank may have fewer. Padding exists only inside the loss's GEMMs. The rank that has a token's
row looks it up, and the sum over ranks is the token's vector. For the loss each rank computes the logits of its range only, a few
rows of the batch at a time. It reduces them to their log-sum-exp and, if it has the label, the logit of the label. Only these two
numbers per token are exchanged. They give each rank the loss and the gradient of its own logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from argosy.compat import gather_into
from argosy.config.model import ModelSpec
from argosy.model.layers import embed
from argosy.model.objective import Output
from argosy.model.ops.cross_entropy import linear_cross_entropy
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

    def __init__(self, spec: ModelSpec, region: Region, *, alike: bool, fp8: bool) -> None:
        super().__init__(spec)
        self.fp8 = fp8
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
            first=self._rows.first, gather=self._gather, width=self._rows.most, multiple=self.multiple,
            fp8_backward=self.rounds,
        )  # fmt: skip

    def _gather(self, ours: Tensor) -> Tensor:
        """Return the `row_parts` of all ranks, [ranks, 2, rows]."""
        group = self._region.group
        every = ours.new_empty(group.size(), *ours.shape)
        gather_into(every.flatten(0, 1), ours, group)
        return every

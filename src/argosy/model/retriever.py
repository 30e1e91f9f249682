"""A two-tower retriever on BERT: it finds the block of text that a query belongs to.

A sequence's vector is the hidden state of its first token, [CLS], after a projection if the model has one. The score of a
query and a block is the dot product of their vectors, divided by the square root of their width as in attention. Each query
must find its block among all blocks of the micro-batch: the others are its negatives. The loss therefore depends on the size
of the micro-batch, but on nothing else about how a batch is cut.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.model import ModelSpec, RetrievalSpec
from argosy.model.encoder import Encoder
from argosy.model.layers import Linear, Together
from argosy.model.objective import Loss, Objective
from argosy.model.sharding import REPLICATED, Declaration

# The k of the top-k accuracies that are logged.
TOPS = (1, 5)


class Tower(nn.Module):
    """An encoder that maps tokens [batch, seq] to vectors [batch, width]."""

    tensor_parallel: ClassVar[Declaration] = {"projection": REPLICATED}

    def __init__(self, spec: ModelSpec, width: int | None) -> None:
        super().__init__()
        self.encoder = Encoder(spec)
        self.together = Together()
        self.projection = None if width is None else Linear(spec.hidden, width)

    def forward(self, tokens: Tensor, padding_mask: Tensor | None) -> Tensor:
        x: Tensor = self.together(self.encoder(tokens, padding_mask=padding_mask))[:, 0]
        if self.projection is not None:
            x = self.projection(x, self.projection.bias)
        return x


class Retriever(nn.Module):
    """A model that maps blocks [batch, seq] and queries [batch, query] to scores [queries, blocks].

    If labels are given, it returns the loss instead.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        retrieval = spec.retrieval or RetrievalSpec()
        self.spec, self.shared = spec, retrieval.shared
        names = ("shared",) if retrieval.shared else ("query", "block")
        self.towers = nn.ModuleDict({name: Tower(spec, retrieval.projection) for name in names})

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        objective: Objective | None = None,
        *,
        query_tokens: Tensor,
        padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
    ) -> Tensor | Loss:
        """Return the scores, or the loss if labels are given.

        Args:
            labels: [batch], a number for each block. Another row's block with the same number is not a negative.
        """
        objective = objective or Objective()
        queries = self.towers["shared" if self.shared else "query"](query_tokens, query_padding_mask)
        blocks = self.towers["shared" if self.shared else "block"](tokens, padding_mask)
        scores: Tensor = queries.float() @ blocks.float().t() / queries.shape[1] ** 0.5
        if labels is None:
            return scores
        rows = torch.arange(len(labels), device=labels.device)
        again = (labels[:, None] == labels[None, :]) & (rows[:, None] != rows[None, :])
        scores = scores.masked_fill(again, float("-inf"))
        total = F.cross_entropy(scores, rows, reduction="sum")
        # The number of blocks that score higher than the right one.
        rank = (scores > scores.diagonal()[:, None]).sum(1)
        metrics = {f"top{n}_accuracy": (rank < n).sum().float() for n in TOPS}
        return Loss(total * objective.scale, total.detach(), metrics)

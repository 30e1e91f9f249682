"""Two towers on BERT: which block of text does a query belong to?

A sequence's vector is the hidden state of its first token, [CLS], through a projection if the model has one; the score
of a query and a block is the product of their vectors, divided by the root of their width as in attention. Each query
is asked for its block among all blocks of the micro-batch: the others are its wrong answers, so that the loss depends
on the size of the micro-batch, and on nothing else about how a batch is cut.
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

TOPS = (1, 5)  # ranks up to which finding the block is counted


class Tower(nn.Module):
    """Tokens [batch, seq] to vectors [batch, width]."""

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
    """Blocks [batch, seq] and queries [batch, query] to scores [queries, blocks], or, with labels, to the loss."""

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
        """`labels` [batch] number the blocks: the block of another row with the same number is no wrong answer."""
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
        rank = (scores > scores.diagonal()[:, None]).sum(1)  # blocks that score higher than the right one
        metrics = {f"top{n}_accuracy": (rank < n).sum().float() for n in TOPS}
        return Loss(total * objective.scale, total.detach(), metrics)

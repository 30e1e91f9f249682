"""T5: an encoder that looks both ways, and a decoder that also looks at what the encoder made.

The order of tokens is known from a bias on the scores alone: one number for each head and range of distances, shared by
all layers of a stack and trained with it. Scores are not divided by the root of the head's width; the initial weights
are smaller instead. Where the output embedding is the input's, hidden states are scaled down before it.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.counts import RELATIVE_BUCKETS
from argosy.config.model import ModelSpec
from argosy.model.attention import Attend, Mask, prepare_attention
from argosy.model.layers import Block, Embedding, Norm
from argosy.model.objective import Loss, Objective
from argosy.model.ops.cross_entropy import linear_cross_entropy
from argosy.model.positions import Across, Context, relative_buckets


class Stack(nn.Module):
    """The blocks of one side."""

    def __init__(self, spec: ModelSpec, layers: int, *, decoder: bool) -> None:
        super().__init__()
        self.spec, self.decoder = spec, decoder
        self.relative = nn.Embedding(RELATIVE_BUCKETS, spec.heads)
        self.layers = nn.ModuleDict({str(i): Block(spec, across=decoder) for i in range(layers)})
        self.norm = Norm(spec, spec.hidden)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """x [batch, seq, hidden]; the decoder's also of the encoder's `memory` [batch, keys, hidden]."""
        buckets = relative_buckets(x.shape[1], x.shape[1], x.device, causal=self.decoder)
        bias = self.relative(buckets).permute(2, 0, 1)[None]  # [1, heads, queries, keys]
        across = None if memory is None else Across(memory, self._attend(Mask(causal=False), x))
        context = Context(None, self._attend(Mask(causal=self.decoder, bias=bias), x), across=across)
        for block in self.layers.values():
            x = block(x, context)
        return F.dropout(self.norm(x), self.spec.dropout, self.training)

    def _attend(self, mask: Mask, x: Tensor) -> Attend:
        dropout = self.spec.dropout if self.training else 0.0
        return prepare_attention(mask, x, self.spec.head_dim, dropout=dropout, scale=1.0)


class EncoderDecoder(nn.Module):
    """Tokens [batch, seq] and the decoder's [batch, target] to logits [batch, target, vocab], or, with labels, to the
    loss."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec)
        self.encoder = Stack(spec, spec.layers, decoder=False)
        self.decoder = Stack(spec, spec.decoder_layers or spec.layers, decoder=True)
        self.head = None if spec.tied else nn.Linear(spec.hidden, spec.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        objective: Objective | None = None,
        *,
        decoder_tokens: Tensor,
    ) -> Tensor | Loss:
        objective = objective or Objective()
        memory = self.encoder(self.embed(tokens))
        x = self.decoder(self.embed(decoder_tokens), memory)
        if self.head is None:
            x = x * self.spec.hidden**-0.5
        weight = self.embed.tokens.weight if self.head is None else self.head.weight
        if labels is None:
            return F.linear(x, weight)
        total, cross_entropy = linear_cross_entropy(x.flatten(0, 1), weight, labels.flatten(), z_loss=objective.z_loss)
        return Loss(total * objective.scale, cross_entropy, objective.z_metrics(total, cross_entropy))

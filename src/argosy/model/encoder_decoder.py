"""T5: an encoder that looks both ways, and a decoder that also looks at what the encoder made.

The order of tokens is known from a bias on the scores alone: one number for each head and range of distances, shared by
all layers of a stack and trained with it. Scores are not divided by the root of the head's width; the initial weights
are smaller instead. Where the output embedding is the input's, hidden states are scaled down before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from argosy.config.model import ModelSpec
from argosy.families.architecture import RELATIVE_BUCKETS, LayerPlan
from argosy.families.family_registry import plan_of
from argosy.model.attention import Attend, Mask, prepare_attention
from argosy.model.layers import Block, Embedding, Linear, Norm, Together
from argosy.model.objective import Loss, Objective, Output, Stream
from argosy.model.positions import Across, Context, relative_buckets
from argosy.model.sharding import OUTSIDE, VOCABULARY, WHOLE, Declaration, Dropout, Sharding, Share, shardable


class RelativeBias(nn.Embedding):
    """The bias on the scores, by range of distances and head."""

    weight = shardable("weight")

    def reset_parameters(self) -> None:
        """Draw nothing: `argosy.model.build` does."""


class Stack(nn.Module):
    """The blocks of one side."""

    tensor_parallel: ClassVar[Declaration] = {"relative": Sharding(dim=1), "norm": OUTSIDE}
    heads: Share = WHOLE  # that are computed here; set by `argosy.parallel`

    def __init__(self, spec: ModelSpec, plan: Sequence[LayerPlan], *, decoder: bool) -> None:
        super().__init__()
        self.spec, self.decoder = spec, decoder
        self.scale = plan[0].attention.scale
        self.relative = RelativeBias(RELATIVE_BUCKETS, spec.heads)
        self.layers = nn.ModuleDict({str(i): Block(spec, layer, across=decoder) for i, layer in enumerate(plan)})
        self.norm: Norm | None = Norm(spec, spec.hidden)  # None: the end of the stack is elsewhere
        self.dropout = Dropout(spec.dropout)
        self.together = Together()

    def forward(self, x: Tensor, seq: int, memory: Tensor | None = None) -> Tensor:
        """x [batch, seq, hidden], or a share of the sequence; the decoder's also of the encoder's `memory` [batch, keys,
        hidden]."""
        buckets = relative_buckets(seq, seq, x.device, causal=self.decoder)
        bias = self.relative(buckets).permute(2, 0, 1)[None]  # [1, heads, queries, keys]
        across = None if memory is None else Across(memory, self._attend(Mask(causal=False), x, seq))
        context = Context(None, self._attend(Mask(causal=self.decoder, bias=bias), x, seq), across=across)
        for block in self.layers.values():
            x = block(x, context)
        if self.norm is not None:
            x = self.together(self.dropout(self.norm(x)))
        return x

    def _attend(self, mask: Mask, x: Tensor, seq: int) -> Attend:
        dropout = self.spec.dropout if self.training else 0.0
        return prepare_attention(mask, x, seq, self.spec.head_dim, dropout=dropout, scale=self.scale, heads=self.heads)


class EncoderDecoder(nn.Module):
    """Tokens [batch, seq] and the decoder's [batch, target] to logits [batch, target, vocab], or, with labels, to the
    loss."""

    tensor_parallel: ClassVar[Declaration] = {"head": VOCABULARY}

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec)
        plan = plan_of(spec)
        # None: all of the stack is in other pipeline stages
        self.encoder: Stack | None = Stack(spec, plan[: spec.layers], decoder=False)
        self.decoder: Stack | None = Stack(spec, plan[spec.layers :], decoder=True)
        self.head = None if spec.tied else Linear(spec.hidden, spec.vocab_size, bias=False)
        self.predict = Output()

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        objective: Objective | None = None,
        *,
        stream: tuple[Tensor, ...] | None = None,
        decoder_tokens: Tensor,
    ) -> Tensor | Loss | Stream:
        """`stream` is what earlier layers, where they are elsewhere, made of both sequences."""
        objective = objective or Objective()
        memory, x = (self.embed(tokens), self.embed(decoder_tokens)) if stream is None else stream
        if self.encoder is not None:
            memory = self.encoder(memory, tokens.shape[1])
        if self.decoder is not None:
            x = self.decoder(x, decoder_tokens.shape[1], memory)
        if self.decoder is None or self.decoder.norm is None:
            return Stream((memory, x), {})
        if self.head is None:
            x = x * self.spec.hidden**-0.5
        weight = self.embed.tokens.weight if self.head is None else self.head.weight
        if labels is None:
            return self.predict.logits(x, weight)
        total, cross_entropy = self.predict.losses(x, weight, labels, z_loss=objective.z_loss)
        return Loss(total * objective.scale, cross_entropy, objective.z_metrics(total, cross_entropy))

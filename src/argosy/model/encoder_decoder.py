"""T5: a bidirectional encoder, and a decoder with cross-attention to the encoder's output.

Positions enter only through a trained bias on the scores: one number per head and bucket of distances, shared by all layers
of a stack. Scores are not divided by sqrt(head_dim); the initial weights are smaller instead. If the output head is tied to
the embedding, hidden states are scaled down before it.
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
    """The relative position bias on the scores, by bucket of distances and head."""

    weight = shardable("weight")

    def reset_parameters(self) -> None:
        """Leave the weights uninitialised; `argosy.model.build` fills them."""


class Stack(nn.Module):
    """The blocks of the encoder or of the decoder, with their relative position bias and final norm."""

    tensor_parallel: ClassVar[Declaration] = {"relative": Sharding(dim=1), "norm": OUTSIDE}
    # The share of the attention heads on this rank. `argosy.parallel` sets it.
    heads: Share = WHOLE

    def __init__(self, spec: ModelSpec, plan: Sequence[LayerPlan], *, decoder: bool) -> None:
        super().__init__()
        self.spec, self.decoder = spec, decoder
        self.scale = plan[0].attention.scale
        self.relative = RelativeBias(RELATIVE_BUCKETS, spec.heads)
        self.layers = nn.ModuleDict({str(i): Block(spec, layer, across=decoder) for i, layer in enumerate(plan)})
        # None if the end of the stack is on another pipeline stage.
        self.norm: Norm | None = Norm(spec, spec.hidden)
        self.dropout = Dropout(spec.dropout)
        self.together = Together()

    def forward(self, x: Tensor, seq: int, memory: Tensor | None = None) -> Tensor:
        """Return the output of the stack.

        Args:
            x: [batch, seq, hidden], or a share of the sequence.
            seq: the length of the whole sequence.
            memory: the encoder's output [batch, keys, hidden], for the decoder.
        """
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
    """A model that maps encoder tokens [batch, seq] and decoder tokens [batch, target] to logits [batch, target, vocab].

    If labels are given, it returns the loss instead.
    """

    tensor_parallel: ClassVar[Declaration] = {"head": VOCABULARY}

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec)
        plan = plan_of(spec)
        # None if all of the stack is on other pipeline stages.
        self.encoder: Stack | None = Stack(spec, plan[: spec.layers], decoder=False)
        self.decoder: Stack | None = Stack(spec, plan[spec.layers :], decoder=True)
        self.head = None if spec.tied else Linear(spec.hidden, spec.vocab_size, bias=False)
        self.predict = Output(spec)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        objective: Objective | None = None,
        *,
        stream: tuple[Tensor, ...] | None = None,
        decoder_tokens: Tensor,
    ) -> Tensor | Loss | Stream:
        """Return the logits, the loss if labels are given, or a `Stream` on a pipeline stage that is not the last.

        Args:
            stream: the previous pipeline stage's output for both sequences.
        """
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

"""BERT: a bidirectional post-norm encoder, the head that predicts masked tokens, and the head that classifies pairs.

Padding is a document of its own that only padding sees. Text never sees it, and no row of the scores is ever empty.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.model import ModelSpec
from argosy.data.samples.masks import IGNORED
from argosy.families.family_registry import plan_of
from argosy.model.layers import Embedding, Linear, Norm, PostNormBlock, Together
from argosy.model.objective import Loss, Objective, Output, Stream
from argosy.model.ops.activation import activate
from argosy.model.positions import make_contexts
from argosy.model.sharding import REPLICATED, VOCABULARY, WHOLE, Declaration, Share, shardable


class Encoder(nn.Module):
    """A bidirectional encoder that maps tokens [batch, seq] to hidden states [batch, seq, hidden]."""

    # The share of the attention heads on this rank. `argosy.parallel` sets it.
    heads: Share = WHOLE

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec)
        plan = plan_of(spec)
        self.attention = plan[0].attention
        self.layers = nn.ModuleDict({str(i): PostNormBlock(spec, layer) for i, layer in enumerate(plan)})

    def forward(
        self,
        tokens: Tensor,
        *,
        stream: tuple[Tensor, ...] | None = None,
        token_types: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states.

        Args:
            stream: the output of the previous pipeline stage.
            padding_mask: [batch, seq], False for padding.
        """
        x: Tensor = self.embed(tokens, types=token_types) if stream is None else stream[0]
        context = make_contexts(
            self.spec, {0: self.attention}, x, seq=tokens.shape[1], documents=padding_mask, training=self.training,
            heads=self.heads,
        )[0]  # fmt: skip
        for block in self.layers.values():
            x = block(x, context)
        return x


class TokenHead(nn.Module):
    """The transform between the last hidden state and the output embedding, and the bias of the logits.

    Its activation is that of the layers, or GELU if theirs is gated, because there is nothing to gate here.
    """

    tensor_parallel: ClassVar[Declaration] = {"transform": REPLICATED, "norm": REPLICATED, "bias": VOCABULARY}
    bias = shardable("bias")

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = "gelu" if spec.gated else spec.activation
        self.transform = Linear(spec.hidden, spec.hidden)
        self.norm = Norm(spec, spec.hidden)
        self.bias = nn.Parameter(torch.empty(spec.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(activate(self.activation, self.transform(x), self.transform.bias))
        return out


class PairHead(nn.Module):
    """The classifier of pairs: two logits per sample, B follows A or not, from the hidden state of [CLS]."""

    tensor_parallel: ClassVar[Declaration] = {"pooler": REPLICATED, "classifier": REPLICATED}

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.pooler = Linear(spec.hidden, spec.hidden)
        self.classifier = Linear(spec.hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        pooled = torch.tanh(self.pooler(x[:, 0], self.pooler.bias))
        logits: Tensor = self.classifier(pooled, self.classifier.bias)
        return logits

    def losses(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy and the number of correct answers."""
        logits = self(x).float()
        right = (logits.argmax(-1) == labels).sum()
        return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED), right.float()


class MaskedLM(nn.Module):
    """An encoder that maps tokens [batch, seq] to logits [batch, seq, vocab], or to the loss if labels are given.

    The loss is that of the masked tokens plus, if the model classifies pairs, the mean pair loss over samples.
    """

    tensor_parallel: ClassVar[Declaration] = {"output": VOCABULARY}

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = Encoder(spec)
        # None if the end of the model is on another pipeline stage.
        self.head: TokenHead | None = TokenHead(spec)
        self.output = None if spec.tied else Linear(spec.hidden, spec.vocab_size, bias=False)
        self.together = Together()
        self.predict = Output(spec)
        self.pair = PairHead(spec) if spec.judges_pairs else None

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        objective: Objective | None = None,
        *,
        stream: tuple[Tensor, ...] | None = None,
        token_types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        predicted: Tensor | None = None,
        pair_labels: Tensor | None = None,
    ) -> Tensor | Loss | Stream:
        """Return the logits, the loss if labels are given, or a `Stream` on a pipeline stage that is not the last.

        Args:
            predicted: [batch, n], the positions of `labels` [batch, n]; None if labels cover all positions.
        """
        objective = objective or Objective()
        x = self.encoder(tokens, stream=stream, token_types=token_types, padding_mask=padding_mask)
        if self.head is None:
            return Stream((x,), {})
        x = self.together(x)
        weight = self.encoder.embed.tokens.weight if self.output is None else self.output.weight
        if labels is None:
            return self.predict.logits(self.head(x), weight, self.head.bias)
        asked = x if predicted is None else x.gather(1, predicted[:, :, None].expand(-1, -1, x.shape[2]))
        total, cross_entropy = self.predict.losses(
            self.head(asked), weight, labels, bias=self.head.bias, z_loss=objective.z_loss
        )
        metrics = objective.z_metrics(total, cross_entropy)
        if self.pair is not None and pair_labels is not None:
            pair, right = self.pair.losses(x, pair_labels)
            total = total + pair * objective.tokens_per_sample
            metrics |= {
                f"{self.spec.pair}_loss": pair.detach() * objective.tokens_per_sample,
                f"{self.spec.pair}_accuracy": right * objective.tokens_per_sample,
            }
        return Loss(total * objective.scale, cross_entropy, metrics)

"""The decoder. Every causal language model of Argosy, from GPT-2 to Qwen3, is this class with a different spec."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from argosy.config.model import ModelSpec
from argosy.data.samples.masks import IGNORED
from argosy.families.architecture import LayerPlan
from argosy.families.family_registry import plan_of
from argosy.model.attention import Prepare, prepare_attention
from argosy.model.layers import AttentionBlock, Block, Embedding, Linear, Norm
from argosy.model.moe import Report, SparseBlock, sum_reports
from argosy.model.objective import Loss, Objective, Output, Stream
from argosy.model.positions import Context, make_contexts
from argosy.model.sharding import OUTSIDE, VOCABULARY, WHOLE, Declaration, Share

if TYPE_CHECKING:
    from argosy.model.kv_cache import KeyValueCache


class Decoder(nn.Module):
    """A decoder that maps tokens [batch, seq] to logits [batch, seq, vocab], or to the loss if labels are given.

    Layers are keyed by index, so that a pipeline stage can drop some without renaming the others.
    """

    tensor_parallel: ClassVar[Declaration] = {"norm": OUTSIDE, "head": VOCABULARY}
    # The share of the attention heads on this rank. `argosy.parallel` sets it.
    heads: Share = WHOLE

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec)
        plan = plan_of(spec)
        self.attention_kinds = list(dict.fromkeys(layer.attention for layer in plan))
        self.kind_of_layer = [self.attention_kinds.index(layer.attention) for layer in plan]
        self.layers = nn.ModuleDict({str(i): _block(spec, layer, i) for i, layer in enumerate(plan)})
        # None if the end of the model is on another pipeline stage.
        self.norm: Norm | None = Norm(spec, spec.hidden)
        self.head = None if spec.tied else Linear(spec.hidden, spec.vocab_size, bias=False)
        self.predict = Output(spec)
        # `argosy.parallel` may replace it.
        self.prepare_attention: Prepare = prepare_attention

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        objective: Objective | None = None,
        *,
        stream: tuple[Tensor, ...] | None = None,
        documents: Tensor | None = None,
        reach: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        logits_at: Tensor | None = None,
        preference: Tensor | None = None,
    ) -> Tensor | Loss | Stream:
        """Return the logits, the loss if labels are given, or a `Stream` on a pipeline stage that is not the last.

        Args:
            stream: the output of the previous pipeline stage.
            documents, reach: [batch, seq], the attention mask as in `argosy.model.attention.Mask`.
            cache: the keys and values of earlier tokens, to which those of `tokens` are added. `documents` covers both.
            logits_at: [n], the tokens whose logits are wanted, by their number in the flattened batch. Default: all.
            preference: [batch, 2], if samples are pairs of answers, as in `argosy.model.preference`.
        """
        objective = objective or Objective()
        counted = objective.counted
        if counted is None and labels is not None:
            counted = (labels != IGNORED).sum()
        scale = None if counted is None else counted * objective.scale
        x = self.embed(tokens, positions) if stream is None else stream[0]
        kinds = {kind: self.attention_kinds[kind] for kind in {self.kind_of_layer[int(index)] for index in self.layers}}
        contexts = make_contexts(
            self.spec, kinds, x, seq=tokens.shape[1] + (0 if cache is None else cache.length), positions=positions,
            documents=documents, reach=reach, training=self.training, scale=scale, heads=self.heads,
            prepare=self.prepare_attention if cache is None else cache.prepare,
            frequencies=None if cache is None else cache.frequencies,
        )  # fmt: skip
        x, reports = self._through(x, contexts, cache)
        routed, load = self._routed(reports, counted)
        if self.norm is None:
            return Stream((x,), routed, load)
        x = self.norm(x)
        weight = self.embed.tokens.weight if self.head is None else self.head.weight
        if labels is None:
            return self.predict.logits(x, weight, at=logits_at)
        if preference is not None and documents is not None:
            from argosy.model.preference import preference_loss

            losses = partial(self.predict.losses, weight=weight)
            return preference_loss(losses, x, labels, documents, preference, objective, routed, load)
        total, cross_entropy = self.predict.losses(x, weight, labels, z_loss=objective.z_loss)
        metrics = objective.z_metrics(total, cross_entropy) | routed
        return Loss(total * objective.scale, cross_entropy, metrics, load)

    def _through(
        self, x: Tensor, contexts: dict[int, Context], cache: KeyValueCache | None
    ) -> tuple[Tensor, dict[int, Report]]:
        """Return the output of the layers, and what those with experts report."""
        reports: dict[int, Report] = {}
        for index, block in self.layers.items():
            context = contexts[self.kind_of_layer[int(index)]]
            if cache is not None:
                context = cache.context(index, context)
            if isinstance(block, SparseBlock):
                x, reports[block.row] = block(x, context)
            else:
                x = block(x, context)
        return x, reports

    def _routed(self, reports: dict[int, Report], counted: Tensor | None) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the metrics and loads of the layers with experts, if there are any."""
        if not reports or counted is None or self.spec.moe is None:
            return {}, None
        return sum_reports(reports, self.spec.layers - self.spec.moe.dense_layers, counted)


def _block(spec: ModelSpec, layer: LayerPlan, index: int) -> AttentionBlock:
    moe = spec.moe
    if moe is None or index < moe.dense_layers:
        return Block(spec, layer)
    return SparseBlock(spec, layer, moe, index - moe.dense_layers)

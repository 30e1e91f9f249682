"""The result of a model's forward pass with labels: a summed loss and summed metrics.

A pipeline stage that lacks the end of the model returns a `Stream`, from which the next stage continues. `Output` maps
hidden states to logits, or to the loss on labels. Every model with a vocabulary ends with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.model import ModelSpec
from argosy.model.ops.cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Objective:
    """The settings from which a model computes its loss."""

    # The weight of log(sum of exp(logits))^2.
    z_loss: float = 0.0
    # The factor of everything that is differentiated: the loss scale of fp16.
    scale: Tensor | float = 1.0
    # The tokens that count in the global batch, divided by its samples. A loss with one term per sample is multiplied by
    # it. All losses are later divided by the tokens, so this makes it a mean over samples, however the batch is cut.
    tokens_per_sample: Tensor | float = 1.0
    # The labels of the micro-batch that count, if the model is given only some of them.
    counted: Tensor | None = None

    def z_metrics(self, total: Tensor, cross_entropy: Tensor) -> dict[str, Tensor]:
        """Return the z-loss part of a token loss as a metric, or nothing if the z-loss is off."""
        return {"z_loss": total.detach() - cross_entropy} if self.z_loss else {}


class Loss(NamedTuple):
    """The loss of one micro-batch. `total` is differentiated; the other fields are metrics without a gradient."""

    # Scaled, with every auxiliary term.
    total: Tensor
    # Summed over the labels that count.
    cross_entropy: Tensor
    # Further sums. The log divides them by the tokens of the global batch.
    metrics: dict[str, Tensor]
    # The number of rows each expert got.
    expert_load: Tensor | None = None  # [layers with experts, experts]


class Stream(NamedTuple):
    """The output of a pipeline stage that is not the last, in place of a loss. The next stage continues from it.

    `metrics` and `expert_load` are this stage's share of the sums in `Loss`, without gradients.
    """

    tensors: tuple[Tensor, ...]  # [batch, seq, hidden] each
    metrics: dict[str, Tensor]
    # Zero for the layers of other stages.
    expert_load: Tensor | None = None  # [layers with experts, experts]


class Output(nn.Module):
    """The output head, without weights of its own: the caller passes the matrix, which may be the embedding's.

    A layout that shards the vocabulary replaces this module.
    """

    # Joins the parts of a sequence that ranks share. Context parallelism sets it.
    join: Callable[[Tensor], Tensor] | None = None
    # Use fp8 matmuls for the gradients of the loss while training. `argosy.parallel` sets it.
    fp8 = False

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.multiple, self.width = spec.vocab_multiple, spec.hidden

    @property
    def rounds(self) -> bool:
        """True if the gradients of this pass are products of 8-bit floats."""
        return self.fp8 and self.training

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, at: Tensor | None = None) -> Tensor:
        """Return the logits of x [batch, seq, hidden] for a weight [vocab, hidden].

        Args:
            at: [n], the tokens whose logits are wanted, by their number in the flattened batch. The result is then [n, vocab].
        """
        return F.linear(self.wanted(x, at), weight, bias)

    def wanted(self, x: Tensor, at: Tensor | None) -> Tensor:
        """Return the hidden states of the tokens `at`, or of all."""
        if self.join is not None:
            x = self.join(x)
        return x if at is None else x.flatten(0, 1).index_select(0, at)

    def losses(
        self, x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss on labels [batch, seq], and its cross-entropy part without a gradient."""
        return linear_cross_entropy(
            x.flatten(0, 1), weight, labels.flatten(), bias=bias, z_loss=z_loss, multiple=self.multiple,
            fp8_backward=self.rounds,
        )  # fmt: skip

"""What a model returns when it is given labels: a loss that is a sum, and sums to report beside it; or, where only a part of
the model is here, what the next part goes on from.

`Output` leads from hidden states to logits, or to the loss of labels: every model with a vocabulary ends there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from argosy.model.ops.cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Objective:
    """How the loss is made."""

    z_loss: float = 0.0  # weight of log(sum of exp(logits))^2
    scale: Tensor | float = 1.0  # everything that is differentiated is multiplied with it (fp16's loss scaling)
    # The tokens that count in the global batch for each of its samples. A loss there is one of for each sample is
    # multiplied with it: divided by the tokens, as everything is, it is then a mean over samples, however the batch is cut.
    tokens_per_sample: Tensor | float = 1.0
    counted: Tensor | None = None  # labels of the micro-batch that count, where a model is given only some of them

    def z_metrics(self, total: Tensor, cross_entropy: Tensor) -> dict[str, Tensor]:
        """The part of a token loss that is its z-loss, where there is one."""
        return {"z_loss": total.detach() - cross_entropy} if self.z_loss else {}


class Loss(NamedTuple):
    """Of one micro-batch. `total` is to be differentiated; the others are for the record and have no gradient."""

    total: Tensor  # scaled, with every auxiliary term
    cross_entropy: Tensor  # summed over the labels that count
    metrics: dict[str, Tensor]  # further sums; the record divides them by the tokens of the global batch
    expert_load: Tensor | None = None  # rows each expert got, whole numbers  # [layers with experts, experts]


class Stream(NamedTuple):
    """What a model that lacks its last parts returns in place of a loss; one that lacks its first parts goes on from it.
    The others are this part's share of the sums in `Loss`, no gradients."""

    tensors: tuple[Tensor, ...]  # [batch, seq, hidden] each
    metrics: dict[str, Tensor]
    expert_load: Tensor | None = None  # zero for the layers that are elsewhere  # [layers with experts, experts]


class Output(nn.Module):
    """It has no weights of its own: the matrix is handed to it, since it may be the embedding's. A layout that spreads the
    vocabulary puts another in its place."""

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [batch, seq, hidden], weight [vocab, hidden]."""
        return F.linear(x, weight, bias)

    def losses(
        self, x: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """(summed loss of labels [batch, seq], its cross-entropy part without gradient)"""
        return linear_cross_entropy(x.flatten(0, 1), weight, labels.flatten(), bias=bias, z_loss=z_loss)

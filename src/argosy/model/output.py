"""From hidden states to logits, or to the loss of labels: where every model with a vocabulary ends."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from argosy.model.ops.cross_entropy import linear_cross_entropy


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

"""The loss as a sum. Dividing happens once, by the number of valid tokens of the whole global batch; a mean of means
would weigh tokens by the batch they happened to be in."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from argosy.data.samples.masks import IGNORED


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed over the labels that count, in 32-bit floats. logits [batch, seq, vocab], labels [batch, seq]"""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")

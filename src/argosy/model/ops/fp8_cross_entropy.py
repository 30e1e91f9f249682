"""The output head fused with the loss (`argosy.model.ops.cross_entropy`), whose two backward matmuls are in 8-bit floats.

The logits are a 16-bit matmul, so that the loss is the one of 16 bits. Their gradient is rounded to e5m2 by the kernel that computes it,
plain and transposed:

    d_hidden = d_logits w        d_logits [rows, vocab]      w^T [width, vocab]         along `vocab`
    d_w      = d_logits^T hidden d_logits^T [vocab, rows]    hidden^T [width, rows]     along `rows`

The gradient of a row's loss is (1 + 2 z_loss lse) p - onehot, with p and onehot between 0 and 1. Its scale is therefore a constant, and no
pass has to find the largest magnitude. The scale is a power of two, next to which 1 is a value of e5m2, and so are 7/8, 3/4 and 5/8. A
magnitude above 3.5, which takes a z-loss with 2 z_loss lse > 2.5, becomes 3.5. Probabilities keep their 3 bits down to 2^-28 (4e-9) and
are zero below 2^-31. What is computed later multiplies the results (`argosy.model.ops.cross_entropy.scaled`), and so does not count here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.config.fp8_rules import FP8_ALIGNMENT
from argosy.data.samples.masks import IGNORED
from argosy.model.ops.choice import use_kernel
from argosy.model.ops.cross_entropy import (
    HeadLoss,
    LossForm,
    gradient_of,
    joined_losses_,
    logits_of,
    padded,
    require_known,
    row_parts,
)
from argosy.model.ops.fp8 import FORWARD, GRADIENT, largest_of_weights, once, quantise, scaled_product

# The gradient of the logits is this times its 8-bit values.
SCALE = 2.0**-14
# The transposed gradients that are kept until one matmul adds them to the head's gradient. With a matmul for each chunk, adding its 32-bit
# result would take half as long as the matmul.
GROUP_BYTES = 1 << 31


def fp8_head_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, wants: Sequence[bool], form: LossForm
) -> HeadLoss:
    """Return the loss of all rows, and the gradients that are wanted of hidden, weight and bias.

    The width, the rows of a chunk and the padded vocabulary are multiples of 16. Ignored rows are added to the last chunk up to there.
    """
    rows, vocab, head = len(hidden), len(weight), padded(weight, form.multiple)
    hidden = padded(hidden, FP8_ALIGNMENT)
    labels = F.pad(labels, (0, len(hidden) - rows), value=IGNORED)
    bias = None if bias is None else padded(bias, form.multiple)
    head8 = once(lambda: _transposed(head, weight), weight, what="head") if wants[0] else None
    scale = torch.full((), SCALE, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if wants[0] else None
    d_weight: Tensor | None = None
    d_bias: Tensor | None = None
    total = torch.zeros((), device=hidden.device)
    cross_entropy = torch.zeros((), device=hidden.device)
    # Without a gradient of the head, no matmul reads the transposed gradients.
    together = rows_together(form.rows, len(head)) if wants[1] else form.rows
    for begin in range(0, len(hidden), together):
        group = hidden[begin : begin + together]
        d_transposed = torch.empty((len(head), len(group)), dtype=GRADIENT, device=hidden.device)
        for first in range(0, len(group), form.rows):
            part = slice(begin + first, begin + min(first + form.rows, len(group)))
            into = d_transposed[:, first : first + form.rows]
            found = _chunk(hidden[part], head, bias, labels[part], into, vocab, form, summed=wants[2])
            total += found.losses.sum()
            cross_entropy += found.cross_entropies.sum()
            if d_hidden is not None and head8 is not None:
                d_hidden[part] = scaled_product((found.d_logits, head8[0].t(), scale, head8[1]), hidden.dtype)
            if found.d_bias is not None:
                d_bias = found.d_bias if d_bias is None else d_bias.add_(found.d_bias)
            # So that the next chunk takes its memory.
            del found
        if wants[1]:
            d_weight = _add_gradient(d_weight, d_transposed, group, scale)
        del d_transposed, into
    d_hidden = None if d_hidden is None else d_hidden[:rows]
    d_weight, d_bias = (None if whole is None else whole[:vocab] for whole in (d_weight, d_bias))
    return HeadLoss(total, cross_entropy, d_hidden, d_weight, d_bias)


def _add_gradient(total: Tensor | None, d_transposed: Tensor, hidden: Tensor, scale: Tensor) -> Tensor:
    """Return total + d_logits^T hidden, in place if there is a total. It has 32 bits."""
    x8 = quantise(hidden, FORWARD)
    factors = d_transposed, x8.transposed.t(), scale, x8.scale
    return scaled_product(factors, torch.float32, total, wide=True)


def rows_together(rows: int, vocab: int) -> int:
    """Return how many rows one matmul adds to the gradient of the head: those of as many chunks as GROUP_BYTES hold."""
    return max(1, GROUP_BYTES // (rows * vocab)) * rows


def _transposed(head: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the head rounded, transposed alone, and its scale. It is the weight, perhaps with rows of zeros below."""
    found = quantise(head, FORWARD, largest_of_weights(weight))
    return found.transposed, found.scale


class _Chunk(NamedTuple):
    losses: Tensor  # [rows]
    cross_entropies: Tensor  # [rows]
    d_logits: Tensor  # [rows, padded vocab], 8-bit
    d_bias: Tensor | None  # [padded vocab], 32-bit


def _chunk(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    transposed: Tensor,
    vocab: int,
    form: LossForm,
    *,
    summed: bool,
) -> _Chunk:
    logits = logits_of(hidden, head, bias)
    if form.gather is None and not use_kernel(logits):
        require_known(labels, vocab)
    parts = row_parts(logits, labels, vocab, form.first)
    parts = parts[None] if form.gather is None else form.gather(parts)
    losses, cross_entropies = joined_losses_(logits, labels, parts, form.z_loss, False, vocab, form.first)
    lse = parts[0, 0] if len(parts) == 1 else parts[:, 0].logsumexp(0)
    d_logits, d_bias = rounded_gradient(logits, labels, lse, transposed, form.z_loss, vocab, form.first, summed=summed)
    return _Chunk(losses, cross_entropies, d_logits, d_bias)


def rounded_gradient(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    transposed: Tensor,
    z_loss: float,
    vocab: int,
    first: int,
    *,
    summed: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of logits [rows, padded vocab], rounded, and if `summed` its sum over rows before that. The logits may be
    overwritten.

    Args:
        lse: the log-sum-exp of each row [rows], over the columns of all ranks.
        transposed: where the rounded gradient is also written, [padded vocab, rows].
        vocab: columns that are not padding.
        first: the first entry of the vocabulary here.
    """
    if use_kernel(logits):
        from argosy.model.ops.kernels.fp8_cross_entropy_kernel import rounded_gradient as fused

        return fused(logits, labels, lse, transposed, z_loss, vocab, first, summed=summed)
    gradient = F.pad(gradient_of(logits[:, :vocab], labels, lse, z_loss, first), (0, logits.shape[1] - vocab))
    largest = torch.finfo(GRADIENT).max
    values = (gradient * (1 / SCALE)).clamp(-largest, largest).to(GRADIENT)
    transposed.copy_(values.t())
    return values, gradient.sum(0) if summed else None

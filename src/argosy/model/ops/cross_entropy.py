"""The output head fused with the loss: logits exist for a few rows at a time, never all at once.

For 32,768 tokens and a vocabulary of 50,304 the logits alone would be 3.3 GB in bf16 and their gradient as much again.
Here the rows are processed in chunks. A chunk is multiplied with the head. Its logits are turned into losses and then, in
place, into their gradient, which is multiplied into the gradients of the hidden states and the head. Then the next chunk
begins. The backward pass only scales these gradients. Losses are sums over the labels that count, in 32-bit floats.

GEMMs are fast only if rows of logits begin at multiples of 16 bytes: a step of gpt2 on an H200 took 239 ms with 50,257 columns
and 131 ms with 50,304. So the head is copied with rows of zeros below it, up to a multiple of `multiple`. The additional logits
are zeros that the softmax does not count, and their gradients are zeros too. Parameters and their gradients do not have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from argosy.compat import add_product, gradient_dtype, require_all
from argosy.config.fp8_rules import FP8_ALIGNMENT
from argosy.data.samples.masks import IGNORED
from argosy.model.ops.beside import multiplies
from argosy.model.ops.choice import use_kernel
from argosy.model.ops.matmul import added

# The approximate size of a chunk's logits.
CHUNK_BYTES = 1 << 30
# Rows in a tile of a GEMM.
_TILE = 256


class LossForm(NamedTuple):
    """How the rows of a batch become a loss."""

    # Rows in a chunk.
    rows: int
    # The columns of logits in a GEMM are a multiple of this.
    multiple: int
    z_loss: float
    with_gradient: bool
    # The gradients of hidden states and head are products of 8-bit floats.
    fp8: bool
    # The first entry of the vocabulary that this rank has.
    first: int
    # Returns the `row_parts` of all ranks [ranks, 2, rows], given this rank's [2, rows]. None: this rank has the whole vocabulary.
    gather: Callable[[Tensor], Tensor] | None


class HeadLoss(NamedTuple):
    """The sums over all rows, and the gradients that are wanted of the first."""

    total: Tensor
    cross_entropy: Tensor
    d_hidden: Tensor | None
    d_weight: Tensor | None
    d_bias: Tensor | None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    first: int = 0,
    gather: Callable[[Tensor], Tensor] | None = None,
    width: int | None = None,
    multiple: int = 1,
    fp8_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of logits = hidden weight^T + bias, and its cross-entropy part without a gradient.

    The two sums differ by the z-loss, z_loss x log(sum of exp)^2 per token, which keeps the logits from drifting.

    Args:
        hidden: [tokens, width].
        weight: [vocab, width], or this rank's part of the vocabulary.
        labels: [tokens].
        first, gather: as in `LossForm`, if the vocabulary is sharded.
        width: the vocabulary size from which the chunk length follows, so that all ranks use equal chunks.
        multiple: the GEMMs have a multiple of this many columns of logits.
        fp8_backward: multiply the gradient of the logits in 8-bit floats, if the width is a multiple of 16. The loss is the same.
    """
    # Inside the autograd function gradients are always disabled, and the inputs do not tell.
    with_gradient = torch.is_grad_enabled()
    rows = chunk_rows(len(hidden), (width or weight.shape[0]) * weight.element_size())
    fp8 = fp8_backward and with_gradient and hidden.shape[1] % FP8_ALIGNMENT == 0
    if fp8:
        # All dimensions of the matmuls are multiples of it. `fp8_head_loss` adds the rows that are missing.
        rows, multiple = -(-rows // FP8_ALIGNMENT) * FP8_ALIGNMENT, lcm(multiple, FP8_ALIGNMENT)
    form = LossForm(rows, multiple, z_loss, with_gradient, fp8, first, gather)
    total, cross_entropy = _apply(hidden, weight, bias, labels, form)
    return total, cross_entropy


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, form: LossForm
    ) -> tuple[Tensor, Tensor]:
        wants = [form.with_gradient and t is not None and t.requires_grad for t in (hidden, weight, bias)]
        if form.fp8 and any(wants):
            from argosy.model.ops.fp8_cross_entropy import fp8_head_loss

            found = fp8_head_loss(hidden, weight, bias, labels, wants, form)
        else:
            found = _head_loss(hidden, weight, bias, labels, wants, form)
        ctx.save_for_backward(found.d_hidden, found.d_weight, found.d_bias)
        # The weight itself, to whose gradient this one may be added.
        ctx.weight, ctx.dtypes = weight, (hidden.dtype, weight.dtype if bias is None else gradient_dtype(bias))
        ctx.mark_non_differentiable(found.cross_entropy)
        return found.total, found.cross_entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        factor = gradients[0]
        if d_weight is not None:
            d_weight = added(ctx.weight, partial(_weight_gradient, d_weight, factor, ctx.weight.dtype))
        d_hidden, d_bias = (
            None if t is None else scaled(t, factor, dtype)
            for t, dtype in zip((d_hidden, d_bias), ctx.dtypes, strict=True)
        )
        return d_hidden, d_weight, d_bias, None, None


_apply: Callable[..., tuple[Tensor, Tensor]] = _LinearCrossEntropy.apply


def _head_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, wants: Sequence[bool], form: LossForm
) -> HeadLoss:
    d_hidden = torch.empty_like(hidden) if any(wants) else None
    d_weight: Tensor | None = None
    d_bias = torch.zeros_like(bias, dtype=torch.float32) if wants[2] and bias is not None else None
    vocab, weight = len(weight), padded(weight, form.multiple)
    bias = None if bias is None else padded(bias, form.multiple)
    total = torch.zeros((), device=hidden.device)
    cross_entropy = torch.zeros((), device=hidden.device)
    for first in range(0, len(hidden), form.rows):
        part = slice(first, first + form.rows)
        logits = logits_of(hidden[part], weight, bias)
        if form.gather is None:
            losses, ce = softmax_loss_(logits, labels[part], form.z_loss, any(wants), vocab)
        else:
            every = form.gather(row_parts(logits, labels[part], vocab, form.first))
            losses, ce = joined_losses_(logits, labels[part], every, form.z_loss, any(wants), vocab, form.first)
        total += losses.sum()
        cross_entropy += ce.sum()
        if d_hidden is not None:
            torch.mm(logits, weight, out=d_hidden[part])
        if wants[1]:
            d_weight = add_product(d_weight, logits.t(), hidden[part])
        if d_bias is not None:
            d_bias += logits[:, :vocab].sum(0, dtype=torch.float32)
    return HeadLoss(total, cross_entropy, d_hidden, None if d_weight is None else d_weight[:vocab], d_bias)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return hidden weight^T + bias, for hidden [tokens, width] and weight [vocab, width].

    Argosy's own kernel for Hopper writes a tile beside the next tile's matmul. Logits are large, and the width is short, so it is faster than
    cuBLAS's. The bits are the same.
    """
    if bias is None and use_kernel(hidden) and multiplies(hidden, weight):
        from argosy.model.ops.kernels.hopper_matmul import plain_product

        return plain_product(hidden, weight)
    return torch.nn.functional.linear(hidden, weight, bias)


def hide_from_compiler() -> None:
    """Exclude this operation from torch.compile. Call it before a model is compiled.

    Compiling gains nothing here, and torch 2.11's compiler drops the gradient of `hidden`. It is not done on import because
    it loads the compiler, which takes more than a second.
    """
    global _apply
    _apply = torch.compiler.disable(_LinearCrossEntropy.apply)


def padded(tensor: Tensor, multiple: int) -> Tensor:
    """Return a tensor with zeros behind its rows, up to a multiple of `multiple` rows; itself if there are as many."""
    missing = -len(tensor) % multiple
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else tensor


def _weight_gradient(
    found: Tensor, factor: Tensor, dtype: torch.dtype, total: Tensor | None = None, *, wide: bool = False
) -> Tensor:
    """Return found x factor as a `GradientOf` does."""
    return scaled(found, factor, torch.float32 if wide else dtype, total)


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
    """Return tensor x factor, converted to `dtype`; or added in place to a total of 32 bits, if there is one."""
    if use_kernel(tensor) and tensor.is_contiguous():
        from argosy.model.ops.kernels.cross_entropy_kernel import scaled as fused

        return fused(tensor, factor, dtype, total)
    return (tensor * factor).to(dtype) if total is None else total.add_(tensor * factor)


def chunk_rows(rows: int, row_bytes: int) -> int:
    """Return the rows per chunk: the fewest equal chunks within CHUNK_BYTES, rounded up to whole tiles if they are long."""
    chunks = max(1, -(-rows * row_bytes // CHUNK_BYTES))
    each = -(-rows // chunks)
    return each if each < _TILE else min(rows, -(-each // _TILE) * _TILE)


def softmax_loss_(
    logits: Tensor, labels: Tensor, z_loss: float, with_gradient: bool, vocab: int
) -> tuple[Tensor, Tensor]:
    """Return the losses and cross-entropies of rows of logits, and overwrite the logits with their gradient.

    Only the first `vocab` logits of a row count. The others are zeros, before and after.
    """
    if use_kernel(logits):
        from argosy.model.ops.kernels.cross_entropy_kernel import softmax_loss_ as fused

        return fused(logits, labels, z_loss, with_gradient, vocab)
    require_known(labels, vocab)
    return joined_losses_(logits, labels, row_parts(logits, labels, vocab)[None], z_loss, with_gradient, vocab)


def require_known(labels: Tensor, vocab: int) -> None:
    """Raise RuntimeError if a label is neither an entry of the vocabulary nor ignored."""
    known = (labels >= 0) & (labels < vocab) | (labels == IGNORED)
    require_all(known, f"a label is not among the {vocab} entries of the vocabulary")


def row_parts(logits: Tensor, labels: Tensor, vocab: int, first: int = 0) -> Tensor:
    """Return what the loss needs of rows of logits, [2, rows]: their log-sum-exp, and the logits of their labels.

    The columns are those of the vocabulary from `first` on. The logit of a label elsewhere, or of none, is zero.
    """
    if use_kernel(logits):
        from argosy.model.ops.kernels.cross_entropy_kernel import row_parts as fused

        return fused(logits, labels, vocab, first)
    full = logits[:, :vocab].float()
    column, here = _columns(labels, vocab, first)
    return torch.stack((full.logsumexp(-1), full.gather(-1, column)[:, 0].masked_fill(~here, 0)))


def joined_losses_(
    logits: Tensor, labels: Tensor, parts: Tensor, z_loss: float, with_gradient: bool, vocab: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the losses and cross-entropies of rows from the `row_parts` of all columns, [parts, 2, rows], and overwrite the logits
    of some columns with their gradient."""
    if use_kernel(logits):
        from argosy.model.ops.kernels.cross_entropy_kernel import joined_losses_ as fused

        return fused(logits, labels, parts, z_loss, with_gradient, vocab, first)
    counts = labels != IGNORED
    lse = parts[:, 0].logsumexp(0)
    cross_entropy = torch.where(counts, lse - parts[:, 1].sum(0), 0.0)
    losses = cross_entropy + torch.where(counts, z_loss * lse * lse, 0.0) if z_loss else cross_entropy
    if with_gradient:
        logits[:, :vocab] = gradient_of(logits[:, :vocab], labels, lse, z_loss, first)
    return losses, cross_entropy


def gradient_of(logits: Tensor, labels: Tensor, lse: Tensor, z_loss: float, first: int) -> Tensor:
    """Return the gradient of some columns of logits in 32 bits, by plain torch.

    Args:
        lse: the log-sum-exp of each row, over all columns.
        first: the first of the columns here.
    """
    gradient = logits.float().sub_(lse[:, None]).exp_()
    if z_loss:
        gradient *= (1 + 2 * z_loss * lse)[:, None]
    column, here = _columns(labels, logits.shape[1], first)
    gradient.scatter_add_(-1, column, -here.to(gradient.dtype)[:, None])
    return gradient.mul_((labels != IGNORED)[:, None])


def _columns(labels: Tensor, vocab: int, first: int) -> tuple[Tensor, Tensor]:
    """Return the columns of the labels [rows, 1], and whether they are here [rows]. Ignored labels are negative, and so never here."""
    column = labels - first
    here = (column >= 0) & (column < vocab)
    return column.masked_fill(~here, 0)[:, None], here

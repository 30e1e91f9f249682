"""Turn rows of logits into losses and, in place, into the gradient of the logits.

A program reads a row twice: once for the sum of exponentials, and once, while the row is still in the cache, to overwrite it.
Eviction hints keep the first read in the cache and let the second read and the write leave it. If several ranks have parts of a row,
one kernel makes the first read and another, once the parts are exchanged, the second. A third scales the resulting gradients and
rounds them to their precision in one pass.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.data.samples.masks import IGNORED

# Programs are large, so that few rows are in flight and a row is still cached at the second read: _LANES threads, with _EACH logits at a
# time. Rows of up to _NARROW logits have half as many.
_LANES, _EACH, _NARROW = 1024, 16, 1 << 16
# Exponentials are powers of 2.
_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _raise_sums(x, highest, total):
    """Return the maximum of each lane's logits, and the sum of their exponentials relative to it."""
    higher = tl.maximum(highest, tl.max(x, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    # The maximum stays a logit: its loss, if it is the label's, is then never below zero.
    return higher, total * tl.exp2((highest - safe) * _LOG2_E) + tl.sum(tl.exp2((x - safe[:, None]) * _LOG2_E), 1)


@triton.jit
def _log_sum_exp(start, width, vocab, LANES: tl.constexpr, EACH: tl.constexpr):
    """Return the log-sum-exp of a row of `width` logits, of which the first `vocab` count."""
    # Every lane keeps its own maximum and sum, and rescales the sum once per EACH logits.
    highest = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    cols = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    whole = vocab // (LANES * EACH) * (LANES * EACH)
    for first in range(0, whole, LANES * EACH):
        x = tl.load(start + first + cols, eviction_policy="evict_last").to(tl.float32)
        highest, total = _raise_sums(x, highest, total)
    if whole < vocab:
        cols += whole
        x = tl.load(start + cols, mask=cols < width, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        highest, total = _raise_sums(tl.where(cols < vocab, x, float("-inf")), highest, total)
    peak = tl.max(highest, 0)
    return peak + tl.log2(tl.sum(total * tl.exp2((highest - peak) * _LOG2_E), 0)) / _LOG2_E


@triton.jit
def _scaled_probability(x, lse, factor):
    """Return the probability of a logit times a factor."""
    return tl.exp2(x.to(tl.float32) * _LOG2_E - lse * _LOG2_E) * factor


@triton.jit
def _write_gradient(start, width, vocab, column, picked, lse, z_loss, B: tl.constexpr):
    """Overwrite a row of logits with their gradient. `column` is that of the label, if it is one of the row, and `picked` its logit."""
    factor = 1.0 + 2.0 * z_loss * lse
    cols = tl.arange(0, B)
    whole = vocab // B * B
    for first in range(0, whole, B):
        logit = tl.load(start + first + cols, eviction_policy="evict_first")
        gradient = _scaled_probability(logit, lse, factor).to(logit.dtype)
        tl.store(start + first + cols, gradient, eviction_policy="evict_first")
    if whole < vocab:
        cols += whole
        logit = tl.load(start + cols, mask=cols < width, other=0.0, eviction_policy="evict_first")
        gradient = tl.where(cols < vocab, _scaled_probability(logit, lse, factor), 0.0).to(logit.dtype)
        tl.store(start + cols, gradient, mask=cols < width, eviction_policy="evict_first")
    # After the loops, which then need not compare every column with the label's.
    tl.debug_barrier()
    here = (column >= 0) & (column < vocab)
    tl.store(start + column, (_scaled_probability(picked, lse, factor) - 1.0).to(start.dtype.element_ty), mask=here)


@triton.jit
def _ignore_row(start, losses, cross_entropies, row, width, GRADIENT: tl.constexpr, B: tl.constexpr):
    tl.store(losses + row, 0.0)
    tl.store(cross_entropies + row, 0.0)
    if GRADIENT:
        for first in range(0, width, B):
            cols = first + tl.arange(0, B)
            tl.store(start + cols, tl.zeros((B,), start.dtype.element_ty), mask=cols < width)


@triton.jit
def _softmax_loss(
    logits, labels, losses, cross_entropies, width, vocab, z_loss, ignored, GRADIENT: tl.constexpr, LANES: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    label = tl.load(labels + row)
    if label == ignored:
        _ignore_row(start, losses, cross_entropies, row, width, GRADIENT, LANES * EACH)
    else:
        lse = _log_sum_exp(start, width, vocab, LANES, EACH)
        picked = tl.load(start + label).to(tl.float32)
        cross_entropy = lse - picked
        tl.store(cross_entropies + row, cross_entropy)
        tl.store(losses + row, cross_entropy + z_loss * lse * lse)
        if GRADIENT:
            # The label's logit must be read before it is overwritten.
            tl.debug_barrier()
            _write_gradient(start, width, vocab, label, picked, lse, z_loss, LANES * EACH)


def softmax_loss_(
    logits: Tensor, labels: Tensor, z_loss: float, with_gradient: bool, vocab: int
) -> tuple[Tensor, Tensor]:
    """Return what `argosy.model.ops.cross_entropy.softmax_loss_` returns, computed by one kernel.

    Padding in a row's last block of logits is read and written too: with the row's end at a multiple of 16, loads and stores are
    vectors up to there. Further padding stays as it is: zeros.
    """
    losses = torch.empty((2, len(logits)), dtype=torch.float32, device=logits.device)
    _softmax_loss[(len(logits),)](
        logits, labels, losses[0], losses[1], logits.shape[1], vocab, z_loss, IGNORED, with_gradient, _LANES,
        _each(logits), num_warps=_LANES // 32,
    )  # fmt: skip
    return losses[0], losses[1]


def _each(logits: Tensor) -> int:
    return _EACH if logits.shape[1] > _NARROW else _EACH // 2


@triton.jit
def _row_parts(logits, labels, parts, rows, width, vocab, begin, LANES: tl.constexpr, EACH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    column = tl.load(labels + row) - begin
    here = (column >= 0) & (column < vocab)
    tl.store(parts + row, _log_sum_exp(start, width, vocab, LANES, EACH))
    tl.store(parts + rows + row, tl.load(start + column, mask=here, other=0.0).to(tl.float32))


def row_parts(logits: Tensor, labels: Tensor, vocab: int, first: int) -> Tensor:
    """Return what `argosy.model.ops.cross_entropy.row_parts` returns, computed by one kernel."""
    parts = torch.empty((2, len(logits)), dtype=torch.float32, device=logits.device)
    _row_parts[(len(logits),)](
        logits, labels, parts, len(logits), logits.shape[1], vocab, first, _LANES, _each(logits), num_warps=_LANES // 32
    )
    return parts


@triton.jit
def _joined_losses(
    logits, labels, parts, losses, cross_entropies, count, rows, width, vocab, begin, z_loss, ignored,
    GRADIENT: tl.constexpr, PARTS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    label = tl.load(labels + row)
    if label == ignored:
        _ignore_row(start, losses, cross_entropies, row, width, GRADIENT, B)
    else:
        part = tl.arange(0, PARTS)
        sums = tl.load(parts + part * 2 * rows + row, mask=part < count, other=float("-inf"))
        peak = tl.max(sums, 0)
        lse = peak + tl.log(tl.sum(tl.exp(sums - peak), 0))
        picked = tl.sum(tl.load(parts + (part * 2 + 1) * rows + row, mask=part < count, other=0.0), 0)
        tl.store(cross_entropies + row, lse - picked)
        tl.store(losses + row, lse - picked + z_loss * lse * lse)
        if GRADIENT:
            _write_gradient(start, width, vocab, label - begin, picked, lse, z_loss, B)


def joined_losses_(
    logits: Tensor, labels: Tensor, parts: Tensor, z_loss: float, with_gradient: bool, vocab: int, first: int
) -> tuple[Tensor, Tensor]:
    """Return what `argosy.model.ops.cross_entropy.joined_losses_` returns, computed by one kernel."""
    losses = torch.empty((2, len(logits)), dtype=torch.float32, device=logits.device)
    _joined_losses[(len(logits),)](
        logits, labels, parts, losses[0], losses[1], len(parts), len(logits), logits.shape[1], vocab, first, z_loss,
        IGNORED, with_gradient, triton.next_power_of_2(len(parts)), _LANES * _each(logits), num_warps=_LANES // 32,
    )  # fmt: skip
    return losses[0], losses[1]


@triton.jit
def _scale(source, factor, target, count, ADDS: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < count
    value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    if ADDS:
        value += tl.load(target + at, mask=inside, other=0.0)
    tl.store(target + at, value.to(target.dtype.element_ty), mask=inside)


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
    """Return what `argosy.model.ops.cross_entropy.scaled` returns, computed by one kernel."""
    result = torch.empty_like(tensor, dtype=dtype) if total is None else total
    adds, block = total is not None, 2048
    _scale[(triton.cdiv(tensor.numel(), block),)](tensor, factor, result, tensor.numel(), adds, block, num_warps=4)
    return result

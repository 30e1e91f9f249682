"""Split the fused query-key-value projection into its three parts and apply rope in the same pass. Without rope no kernel runs.

The backward pass joins the three gradients, rotates them back and sums the bias gradient in one pass. The projection's columns
are slots of one head each: for every KV head its queries, its key, its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.compat import gradient_dtype
from argosy.model.ops.fp8 import GRADIENT, Quantised
from argosy.model.ops.heads import heads_of
from argosy.model.ops.kernels.fp8_kernel import largest_of, room_for, scale_of, store_scaled, store_transposed
from argosy.model.ops.kernels.row_sums_kernel import column_sums, sum_rows
from argosy.model.ops.largest import SLOTS, noted
from argosy.model.ops.token_sums import noted_sums, want_sums

# Tokens per tile and tiles per program in `_join`, and quads of tokens per tile in `_join_rounded`, whose programs have one tile each.
_TOKENS, _TILES_DOWN = 32, 8
_QUADS = 16


@triton.jit
def _turn(first, second, cos, sin, BACK: tl.constexpr):
    if BACK:
        return first * cos + second * sin, second * cos - first * sin
    else:
        return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _split(
    qkv, q, k, v, cos, sin, tokens, table_rows, kv_heads, GROUP: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Write rotated queries [tokens, heads, head_dim] and keys [tokens, kv_heads, head_dim], and values as they are."""
    place = tl.program_id(1)
    group = place // (GROUP + 2)
    slot = place % (GROUP + 2)
    token = tl.program_id(0) * R + tl.arange(0, R)
    dim = tl.arange(0, HALF)
    inside = (token < tokens)[:, None] & (dim < HALF)[None, :]
    at = token.to(tl.int64)[:, None]
    source = qkv + at * (kv_heads * (GROUP + 2) * 2 * HALF) + place * 2 * HALF
    first = tl.load(source + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    if slot <= GROUP:
        angle = (token % table_rows)[:, None] * HALF + dim[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        first, second = _turn(first, second, c, s, False)
    if slot < GROUP:
        target = q + at * (kv_heads * GROUP * 2 * HALF) + (group * GROUP + slot) * 2 * HALF
    elif slot == GROUP:
        target = k + at * (kv_heads * 2 * HALF) + group * 2 * HALF
    else:
        target = v + at * (kv_heads * 2 * HALF) + group * 2 * HALF
    tl.store(target + dim[None, :], first.to(q.dtype.element_ty), mask=inside)
    tl.store(target + HALF + dim[None, :], second.to(q.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(
    d_q, d_k, d_v, cos, sin, token, tokens, seq, table_rows, place, strides,
    ROPE: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Return both halves of a head's gradient, turned back, and a mask of the tokens that there are.

    `strides` are those of d_q, d_k and d_v over batch, head and token. The last stride is 1.
    """
    qb, qh, qt, kb, kh, kt, vb, vh, vt = strides
    group = place // (GROUP + 2)
    slot = place % (GROUP + 2)
    dim = tl.arange(0, HALF)
    inside = (token < tokens)[:, None] & (dim < HALF)[None, :]
    row = (token // seq).to(tl.int64)
    t = (token % seq).to(tl.int64)
    if slot < GROUP:
        source = d_q + (row * qb + (group * GROUP + slot) * qh + t * qt)[:, None]
    elif slot == GROUP:
        source = d_k + (row * kb + group * kh + t * kt)[:, None]
    else:
        source = d_v + (row * vb + group * vh + t * vt)[:, None]
    first = tl.load(source + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROPE:
        if slot <= GROUP:
            angle = (token % table_rows)[:, None] * HALF + dim[None, :]
            c = tl.load(cos + angle, mask=inside, other=0.0)
            s = tl.load(sin + angle, mask=inside, other=0.0)
            first, second = _turn(first, second, c, s, True)
    return first, second, inside


@triton.jit
def _join(
    d_q, d_k, d_v, cos, sin, d_qkv, sums, tokens, seq, table_rows, kv_heads, qb, qh, qt, kb, kh, kt, vb, vh, vt,
    ROPE: tl.constexpr, SUMMED: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the projection from the three gradients."""
    place = tl.program_id(1)
    row_size = kv_heads * (GROUP + 2) * 2 * HALF
    sum_first = tl.zeros((R, HALF), tl.float32)
    sum_second = tl.zeros((R, HALF), tl.float32)
    dim = tl.arange(0, HALF)
    for tile in tl.range(0, TILES, num_stages=3):
        token = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        first, second, inside = _gradient(
            d_q, d_k, d_v, cos, sin, token, tokens, seq, table_rows, place, (qb, qh, qt, kb, kh, kt, vb, vh, vt), ROPE, GROUP, HALF
        )  # fmt: skip
        if SUMMED:
            sum_first += first
            sum_second += second
        target = d_qkv + token.to(tl.int64)[:, None] * row_size + place * 2 * HALF
        tl.store(target + dim[None, :], first.to(d_qkv.dtype.element_ty), mask=inside)
        tl.store(target + HALF + dim[None, :], second.to(d_qkv.dtype.element_ty), mask=inside)
    if SUMMED:
        at = sums + tl.program_id(0) * row_size + place * 2 * HALF + dim
        tl.store(at, tl.sum(sum_first, 0))
        tl.store(at + HALF, tl.sum(sum_second, 0))


@triton.jit
def _join_rounded(
    d_q, d_k, d_v, cos, sin, values, transposed, scale, parts, used, sums, quads, tokens, seq, table_rows, kv_heads,
    qb, qh, qt, kb, kh, kt, vb, vh, vt,
    ROPE: tl.constexpr, SUMMED: tl.constexpr, LARGEST: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    QUADS: tl.constexpr,
):  # fmt: skip
    """Write what `_join` does in 8 bits. `parts` are the largest magnitudes of parts of the three gradients."""
    place = tl.program_id(1)
    factor = scale_of(parts, used, LARGEST, PARTS)
    if ROPE:
        # A rotation raises the larger of a pair by at most sqrt(2).
        factor *= 1.42
    if (tl.program_id(0) == 0) & (place == 0):
        tl.store(scale, factor)
    inverse = tl.div_rn(1.0, factor)
    width = kv_heads * (GROUP + 2) * 2 * HALF
    col = place * 2 * HALF + tl.arange(0, HALF)
    strides = (qb, qh, qt, kb, kh, kt, vb, vh, vt)
    quad = tl.program_id(0) * QUADS + tl.arange(0, QUADS)
    token = quad * 4
    a, e, inside = _gradient(d_q, d_k, d_v, cos, sin, token, tokens, seq, table_rows, place, strides, ROPE, GROUP, HALF)
    b, f, _ = _gradient(d_q, d_k, d_v, cos, sin, token + 1, tokens, seq, table_rows, place, strides, ROPE, GROUP, HALF)
    c, g, _ = _gradient(d_q, d_k, d_v, cos, sin, token + 2, tokens, seq, table_rows, place, strides, ROPE, GROUP, HALF)
    d, h, _ = _gradient(d_q, d_k, d_v, cos, sin, token + 3, tokens, seq, table_rows, place, strides, ROPE, GROUP, HALF)
    target = values + token.to(tl.int64)[:, None] * width + col[None, :]
    a = store_scaled(a, inverse, target, inside, LARGEST)
    e = store_scaled(e, inverse, target + HALF, inside, LARGEST)
    b = store_scaled(b, inverse, target + width, inside, LARGEST)
    f = store_scaled(f, inverse, target + width + HALF, inside, LARGEST)
    c = store_scaled(c, inverse, target + 2 * width, inside, LARGEST)
    g = store_scaled(g, inverse, target + 2 * width + HALF, inside, LARGEST)
    d = store_scaled(d, inverse, target + 3 * width, inside, LARGEST)
    h = store_scaled(h, inverse, target + 3 * width + HALF, inside, LARGEST)
    store_transposed(a, b, c, d, transposed, quad, col, quads, width, quads)
    store_transposed(e, f, g, h, transposed, quad, col + HALF, quads, width, quads)
    if SUMMED:
        at = sums + tl.program_id(0) * width + col
        tl.store(at, tl.sum((a + b) + (c + d), 0) * factor)
        tl.store(at + HALF, tl.sum((e + f) + (g + h), 0) * factor)


def split(
    qkv: Tensor, rope: tuple[Tensor, Tensor] | None, group: int, head_dim: int, apart: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [batch, heads, seq, head_dim] of qkv [batch, seq, slots x head_dim].

    With rope none of them is a part of qkv, whose memory is then free. Without, `heads_of` says which are."""
    qkv = qkv.contiguous()
    batch, seq, _ = qkv.shape
    slots = qkv.unflatten(-1, (-1, group + 2, head_dim))  # [batch, seq, kv_heads, group + 2, head_dim]
    kv_heads = slots.shape[2]
    if rope is None:
        return heads_of(*slots.split((group, 1, 1), dim=3), apart=apart)
    q = torch.empty((batch, seq, kv_heads * group, head_dim), dtype=qkv.dtype, device=qkv.device)
    k, v = (torch.empty((batch, seq, kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device) for _ in range(2))
    _split[(triton.cdiv(batch * seq, _TOKENS), kv_heads * (group + 2))](
        qkv, q, k, v, *rope, batch * seq, rope[0].shape[0] * seq, kv_heads, group, head_dim // 2, _TOKENS,
        num_warps=4,
    )  # fmt: skip
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def join(
    gradients: Sequence[Tensor], rope: tuple[Tensor, Tensor] | None, group: int, *, summed: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of what `split` has split, given those of queries, keys and values.

    Args:
        summed: the type of its sum over tokens, if that is wanted too.
    """
    whole = whole_of(gradients) if rope is None else None
    if whole is not None:
        if summed is None:
            return whole, None
        sums = noted_sums(gradients[0])
        return whole, column_sums(whole, summed) if sums is None else sums.to(summed)
    batch, kv_heads, seq, head_dim = gradients[1].shape
    width, device = kv_heads * (group + 2) * head_dim, gradients[0].device
    d_qkv = torch.empty((batch, seq, width), dtype=gradients[0].dtype, device=device)
    chunks = triton.cdiv(batch * seq, _TOKENS * _TILES_DOWN)
    sums = None if summed is None else torch.empty((chunks, width), dtype=torch.float32, device=device)
    sources, sizes = _sources(gradients, rope)
    _join[(chunks, width // head_dim)](
        *sources, d_qkv, sums, *sizes, rope is not None, summed is not None, group, head_dim // 2, _TOKENS, _TILES_DOWN, num_warps=4
    )  # fmt: skip
    return d_qkv, None if sums is None or summed is None else sum_rows(sums, summed)


def join_rounded(
    gradients: Sequence[Tensor], rope: tuple[Tensor, Tensor] | None, group: int, *, summed: torch.dtype | None
) -> tuple[Quantised, Tensor | None]:
    """Return what `join` does, rounded to 8 bits, with batch and seq as one dimension, which is a multiple of 16."""
    batch, kv_heads, seq, head_dim = gradients[1].shape
    width, device = kv_heads * (group + 2) * head_dim, gradients[0].device
    parts = _noted(gradients)
    if parts is None:
        parts = largest_of(*(g if _is_dense(g) else g.contiguous() for g in gradients))
    room = room_for(batch * seq, width, GRADIENT, device)
    chunks = triton.cdiv(batch * seq, 4 * _QUADS)
    sums = None if summed is None else torch.empty((chunks, width), dtype=torch.float32, device=device)
    sources, sizes = _sources(gradients, rope)
    _join_rounded[(chunks, width // head_dim)](
        *sources, *room, parts, len(parts), sums, batch * seq // 4, *sizes, rope is not None, summed is not None, torch.finfo(GRADIENT).max, SLOTS,
        group, head_dim // 2, _QUADS, num_warps=2,
    )  # fmt: skip
    return room, None if sums is None or summed is None else sum_rows(sums, summed)


def _sources(
    gradients: Sequence[Tensor], rope: tuple[Tensor, Tensor] | None
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """Return what the kernels read, and its sizes and strides."""
    d_q, d_k, d_v = (g if g.stride(-1) == 1 else g.contiguous() for g in gradients)
    batch, kv_heads, seq, _ = d_k.shape
    table_rows = 1 if rope is None else rope[0].shape[0] * seq
    strides = (*d_q.stride()[:3], *d_k.stride()[:3], *d_v.stride()[:3])
    return (d_q, d_k, d_v, *(rope or (None, None))), (batch * seq, seq, table_rows, kv_heads, *strides)


def whole_of(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor [batch, seq, 3 x heads x head_dim] that has three tensors in its slots, head by head: what `split` returns where
    each query head has a KV head of its own, and the gradients of these as attention kernels write them. Else None."""
    q, k, v = parts
    batch, heads, seq, head_dim = q.shape
    width = 3 * heads * head_dim
    strides = (seq * width, 3 * head_dim, width, 1)
    places = [t.storage_offset() - q.storage_offset() for t in parts]
    if places != [0, head_dim, 2 * head_dim] or any(t.shape != q.shape or t.stride() != strides for t in parts):
        return None
    if any(t.untyped_storage().data_ptr() != q.untyped_storage().data_ptr() for t in (k, v)):
        return None
    return q.as_strided((batch, seq, width), (seq * width, width, 1))


def _noted(gradients: Sequence[Tensor]) -> Tensor | None:
    """Return the largest magnitudes of parts of all gradients, if one kernel has found them together."""
    found = [noted(gradient) for gradient in gradients]
    return found[0] if all(one is found[0] for one in found) else None


def _is_dense(x: Tensor) -> bool:
    """True if x has all elements of a piece of memory, in whatever order."""
    return x.transpose(1, 2).is_contiguous() or x.is_contiguous()


class SplitHeads(torch.autograd.Function):
    """Splits qkv [batch, seq, slots x head_dim] into q, k, v [batch, heads, seq, head_dim].

    `bias` is not added here, because the matmul has added it. The backward pass only computes its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, bias: Tensor | None, rope: tuple[Tensor, Tensor] | None, group: int, head_dim: int, apart: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.form = (rope, group, None if bias is None else gradient_dtype(bias))
        q, k, v = split(qkv, rope, group, head_dim, apart)
        if ctx.needs_input_grad[1] and rope is None:
            want_sums(q, qkv.shape[-1])
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rope, group, bias_dtype = ctx.form
        summed = bias_dtype if ctx.needs_input_grad[1] else None
        return *join(gradients, rope, group, summed=summed), None, None, None, None

"""Split the fused query-key-value projection into its three parts and apply rope in the same pass.

The backward pass joins the three gradients, rotates them back and sums the bias gradient in one pass. The projection's columns
are slots of one head each: for every KV head its queries, its key, its value.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.model.ops.kernels.fp8_kernel import raise_largest
from argosy.model.ops.largest import note, slots

# Tokens per tile.
_TOKENS = 32
# Tiles per program in `_join`.
_TILES_DOWN = 8


@triton.jit
def _turn(first, second, cos, sin, BACK: tl.constexpr):
    if BACK:
        return first * cos + second * sin, second * cos - first * sin
    else:
        return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _split(qkv, q, k, cos, sin, tokens, table_rows, kv_heads, GROUP: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr):
    """Write rotated queries [tokens, heads, head_dim] and keys [tokens, kv_heads, head_dim]. Values stay where they are."""
    # The head's place among the queries and keys of all groups.
    place = tl.program_id(1)
    group = place // (GROUP + 1)
    slot = place % (GROUP + 1)
    token = tl.program_id(0) * R + tl.arange(0, R)
    dim = tl.arange(0, HALF)
    inside = (token < tokens)[:, None] & (dim < HALF)[None, :]
    at = token.to(tl.int64)[:, None]
    source = qkv + at * (kv_heads * (GROUP + 2) * 2 * HALF) + (group * (GROUP + 2) + slot) * 2 * HALF
    first = tl.load(source + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    angle = (token % table_rows)[:, None] * HALF + dim[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    first, second = _turn(first, second, c, s, False)
    if slot < GROUP:
        target = q + at * (kv_heads * GROUP * 2 * HALF) + (group * GROUP + slot) * 2 * HALF
    else:
        target = k + at * (kv_heads * 2 * HALF) + group * 2 * HALF
    tl.store(target + dim[None, :], first.to(q.dtype.element_ty), mask=inside)
    tl.store(target + HALF + dim[None, :], second.to(q.dtype.element_ty), mask=inside)


@triton.jit
def _join(
    d_q, d_k, d_v, cos, sin, d_qkv, d_bias, found, tokens, seq, table_rows, kv_heads,
    qb, qh, qt, kb, kh, kt, vb, vh, vt,
    ROPE: tl.constexpr, HAS_BIAS: tl.constexpr, MEASURED: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    R: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write d_qkv from the three gradients, given their strides over batch, head and token (the last stride is 1)."""
    place = tl.program_id(1)
    group = place // (GROUP + 2)
    slot = place % (GROUP + 2)
    dim = tl.arange(0, HALF)
    row_size = kv_heads * (GROUP + 2) * 2 * HALF
    sum_first = tl.zeros((R, HALF), tl.float32)
    sum_second = tl.zeros((R, HALF), tl.float32)
    most = tl.zeros((R, HALF), tl.float32)
    for tile in tl.range(0, TILES, num_stages=3):
        token = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
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
        if HAS_BIAS:
            sum_first += first
            sum_second += second
        target = d_qkv + token.to(tl.int64)[:, None] * row_size + place * 2 * HALF
        first = first.to(d_qkv.dtype.element_ty)
        second = second.to(d_qkv.dtype.element_ty)
        tl.store(target + dim[None, :], first, mask=inside)
        tl.store(target + HALF + dim[None, :], second, mask=inside)
        if MEASURED:
            size = tl.maximum(
                tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL
            )
            most = tl.maximum(most, tl.where(size == size, size, float("inf")))
    if MEASURED:
        raise_largest(found, tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), most)
    if HAS_BIAS:
        at = d_bias + tl.program_id(0) * row_size + place * 2 * HALF + dim
        tl.store(at, tl.sum(sum_first, 0))
        tl.store(at + HALF, tl.sum(sum_second, 0))


class SplitHeads(torch.autograd.Function):
    """Splits qkv [batch, seq, slots x head_dim] into q, k, v [batch, heads, seq, head_dim].

    `bias` is not added here, because the matmul has added it. The backward pass only computes its gradient. If `measured`, it notes the
    largest magnitude of the gradient of qkv (`argosy.model.ops.largest`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        bias: Tensor | None,
        rope: tuple[Tensor, Tensor] | None,
        group: int,
        head_dim: int,
        measured: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.contiguous()
        batch, seq, _ = qkv.shape
        slots = qkv.unflatten(-1, (-1, group + 2, head_dim))  # [batch, seq, kv_heads, group + 2, head_dim]
        kv_heads = slots.shape[2]
        q, k, v = slots.split((group, 1, 1), dim=3)
        if rope is None:
            q, k = q.flatten(2, 3), k.flatten(2, 3)
        else:
            q = torch.empty((batch, seq, kv_heads * group, head_dim), dtype=qkv.dtype, device=qkv.device)
            k = torch.empty((batch, seq, kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
            _split[(triton.cdiv(batch * seq, _TOKENS), kv_heads * (group + 1))](
                qkv, q, k, *rope, batch * seq, rope[0].shape[0] * seq, kv_heads, group, head_dim // 2, _TOKENS,
                num_warps=4,
            )  # fmt: skip
        ctx.form = (rope, None if bias is None else bias.dtype, group, head_dim, measured, qkv.shape, qkv.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.flatten(2, 3).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_q, d_k, d_v = (g if g.stride(-1) == 1 else g.contiguous() for g in gradients)
        rope, bias_dtype, group, head_dim, measured, shape, dtype = ctx.form
        batch, seq, width = shape
        kv_heads = width // head_dim // (group + 2)
        d_qkv = torch.empty(shape, dtype=dtype, device=d_q.device)
        chunks = triton.cdiv(batch * seq, _TOKENS * _TILES_DOWN)
        partial = None if bias_dtype is None else torch.empty((chunks, width), dtype=torch.float32, device=d_q.device)
        tables = (None, None) if rope is None else rope
        found = slots(d_q.device) if measured else None
        _join[(chunks, kv_heads * (group + 2))](
            d_q, d_k, d_v, *tables, d_qkv, partial, found, batch * seq, seq, 1 if rope is None else rope[0].shape[0] * seq,
            kv_heads, *d_q.stride()[:3], *d_k.stride()[:3], *d_v.stride()[:3],
            rope is not None, partial is not None, measured, group, head_dim // 2, _TOKENS, _TILES_DOWN, num_warps=4,
        )  # fmt: skip
        note(d_qkv, found)
        return d_qkv, None if partial is None else partial.sum(0).to(bias_dtype), None, None, None, None

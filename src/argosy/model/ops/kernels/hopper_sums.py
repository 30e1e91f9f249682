"""The 32-bit sums of dQ to which the attention backward kernels add: prepared before such a kernel, written as dQ after it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from argosy.model.ops.kernels.hopper_forward import bound, described
from argosy.model.ops.kernels.hopper_order import _SIDE, _WORKERS, ANY, FOLDED, order_of, section
from argosy.model.ops.matmul import processors

_LOGS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
# Columns of dQ that are written at a time.
_PART = 64


@triton.jit
def _attention_before(
    out, d_out, lse, logs, sums, turns, seq, heads, out_batch, out_token, out_head, d_out_batch, d_out_token, d_out_head,
    WIDTH: tl.constexpr, R: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Prepare R queries of a head: write lse to base 2 and delta, the sum of out x d_out; zero the sums of dQ and their counters."""
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % (seq // R)
    batch = (tl.program_id(0) // heads // (seq // R)).to(tl.int64)
    token = (block * R + tl.arange(0, R)).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    o = tl.load(out + batch * out_batch + head * out_head + token[:, None] * out_token + column).to(tl.float32)
    d = tl.load(d_out + batch * d_out_batch + head * d_out_head + token[:, None] * d_out_token + column).to(tl.float32)
    row = batch * heads + head
    at = logs + (row * seq + block * R) * 2 + tl.arange(0, R)
    tl.store(at, tl.load(lse + row * seq + token) * 1.4426950408889634)
    tl.store(at + R, tl.sum(o * d, 1))
    tl.store(sums + (row * seq + block * R) * WIDTH + tl.arange(0, R * WIDTH), tl.zeros([R * WIDTH], tl.float32))
    tl.store(turns + (row * (seq // R) + block) * TURNS + tl.arange(0, TURNS), tl.zeros([TURNS], tl.int32))


@triton.jit
def _attention_after(
    sums, d_q, seq, heads, plain_scale, WIDTH: tl.constexpr, R: tl.constexpr, PART: tl.constexpr, BY_THREAD: tl.constexpr
):  # fmt: skip
    """Write dQ of R queries of a head from its 32-bit sums, PART columns at a time. The sums are stored row by row or, BY_THREAD, by 16
    rows, 8 columns, row of 8, pair of columns, half of the 16 rows, column of the pair."""
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % (seq // R)
    batch = (tl.program_id(0) // heads // (seq // R)).to(tl.int64)
    token = batch * seq + block * R + tl.arange(0, R)
    for part in tl.static_range(WIDTH // PART):
        first = ((batch * heads + head) * seq + block * R) * WIDTH + part * (R * PART)
        x = (tl.load(sums + first + tl.arange(0, R * PART)) * plain_scale).to(d_q.dtype.element_ty)
        if BY_THREAD:
            x = tl.permute(tl.reshape(x, [R // 16, PART // 8, 8, 4, 2, 2]), [0, 4, 2, 1, 3, 5])
        x = tl.reshape(x, [R, PART])
        tl.store(d_q + token[:, None] * (heads * WIDTH) + head * WIDTH + part * PART + tl.arange(0, PART)[None, :], x)


@dataclass(frozen=True)
class BackwardKernel:
    """A backward kernel and how it adds to the sums."""

    kernel: Any
    # Its counters per block of queries.
    turns_each: int
    # It stores its sums in the order of its threads, not row by row.
    by_thread: bool
    # It has the order FOLDED.
    folds: bool

    def run(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, last: Tensor | None,
        *, repeatable: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        batch, seq, heads, width = q.shape
        kv_heads, side = k.shape[2], _SIDE.value
        d_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        d_k, d_v = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
        sums = torch.empty(q.numel(), dtype=torch.float32, device=q.device)
        logs = torch.empty((batch * heads * seq // side, 2 * side), dtype=torch.float32, device=q.device)
        turns = torch.empty(batch * heads * (seq // side) * self.turns_each, dtype=torch.int32, device=q.device)
        key_blocks = seq // (side * _WORKERS.value)
        tiles = (batch * heads * (seq // side),)
        order = ANY.value
        if repeatable:
            order = order_of(
                key_blocks, heads // kv_heads if self.folds else 0, processors(q.device), bounded=last is not None
            ).value
        programs = key_blocks // 2 if order == FOLDED.value else key_blocks
        _attention_before[tiles](
            out, d_out, lse, logs, sums, turns, seq, heads, *out.stride()[:3], *d_out.stride()[:3], width, side,
            self.turns_each, num_warps=4,
        )  # fmt: skip
        self.kernel[(batch * kv_heads * programs,)](
            described(q, side), described(k, side), described(v, side), described(d_out, side),
            TensorDescriptor(logs, list(logs.shape), [2 * side, 1], [1, 2 * side], _LOGS), d_k, d_v, sums, turns, *bound(last),
            key_blocks, seq, q.stride(2), k.stride(2), v.stride(2), d_out.stride(2), scale / math.log(2), scale,
            kv_heads, heads // kv_heads, section(batch * kv_heads, key_blocks), order, last is not None, num_warps=4,
        )  # fmt: skip
        _attention_after[tiles](sums, d_q, seq, heads, scale, width, side, _PART, self.by_thread, num_warps=4)
        return d_q, d_k, d_v

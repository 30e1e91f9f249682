"""The backward pass of causal attention on Hopper, for heads of 64.

A program has 128 keys of one KV head. It iterates over the queries that see them, 64 of one head at a time, of all heads that share
these keys. The gradients of keys and values are summed in registers and written once. One warp loads, and three groups of four warps
compute. Two workers have 64 keys each and compute

    S = K Q^T    P = exp(S - lse)    dP = V dO^T    dS = P (dP - delta)    dV += P dO    dK += dS Q

They pass dS to the third group, which computes dQ = dS^T K and adds it to a 32-bit sum in memory. The sum is stored in the order of
the threads' registers, for wide additions. A last kernel restores the row order.

In deterministic mode, programs add to a sum in a fixed order (`hopper_order.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from argosy.model.ops.kernels.hopper_forward import _exp2, _fetch, described
from argosy.model.ops.kernels.hopper_order import (
    _AWAIT_TURN,
    _END_TURN,
    _READ_TURN,
    _WORKERS,
    ANY,
    FIRST_KEYS,
    FOLDED,
    _adding_before,
    _place,
    _step,
    order_of,
    section,
)
from argosy.model.ops.matmul import processors

# The head width; keys per worker, which is also queries per step.
_WIDTH = gl.constexpr(64)
_SIDE = gl.constexpr(64)
# Stages of loaded queries, and slots for dS between the workers and the adder.
_STAGES, _SLOTS = gl.constexpr(4), gl.constexpr(4)
# Counters per block of queries: one for each warp that adds.
_TURNS = gl.constexpr(4)
_LOGS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
# A thread's four values of 16 rows and 8 columns are added to 16 contiguous bytes.
_ADD = gl.constexpr(
    "red.global.add.v4.f32 [$8], {$4, $5, $6, $7}; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
)
_ADD_OPERANDS = gl.constexpr("=r,=r,=r,=r,f,f,f,f,l,l,l,l")


# Triton 3.9 renamed `_reinterpret`.
if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def _as_rows(logs, LAYOUT: gl.constexpr):
        return logs.reinterpret(gl.float32, [2, _SIDE], LAYOUT)

else:

    @gluon.jit
    def _as_rows(logs, LAYOUT: gl.constexpr):
        return logs._reinterpret(gl.float32, [2, _SIDE], LAYOUT)


@gluon.jit
def _fetcher(
    here, fetch, key_blocks, seq,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, ORDER: gl.constexpr,
    WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 2 if ORDER == FOLDED else 1
    k_here, v_here, q_here, d_out_here, logs_here, _, kv_full, full, free, _, _ = here
    q, k, v, d_out, logs, q_head, k_head, v_head, d_out_head = fetch
    blocks = key_blocks * _WORKERS
    for part in range(PARTS):
        pair, key_block, before = _place(key_blocks, part, SECTION, ORDER)
        start = pair // KV_HEADS * seq
        kv_head = pair % KV_HEADS
        mbarrier.expect(kv_full.index(part), 2 * _WORKERS * _SIDE * WIDTH * 2)
        for worker in gl.static_range(_WORKERS):
            row = start + (key_block * _WORKERS + worker) * _SIDE
            _fetch(k, [row, kv_head * k_head], kv_full.index(part), k_here.index(part * _WORKERS + worker))
            _fetch(v, [row, kv_head * v_head], kv_full.index(part), v_here.index(part * _WORKERS + worker))
        for own in range((blocks - key_block * _WORKERS) * GROUP):
            block, member = _step(own, key_block, part, blocks, GROUP, ORDER)
            step = before * GROUP + own
            head = kv_head * GROUP + member
            stage = step % STAGES
            row = start + block * _SIDE
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * _SIDE * WIDTH * 2 + 2 * _SIDE * 4)
            _fetch(q, [row, head * q_head], full.index(stage), q_here.index(stage))
            _fetch(logs, [(pair * GROUP + member) * blocks + block, 0], full.index(stage), logs_here.index(stage))
            _fetch(d_out, [row, head * d_out_head], full.index(stage), d_out_here.index(stage))


@gluon.jit
def _adder(
    here, sums, turns, key_blocks, GROUP: gl.constexpr, SECTION: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 2 if ORDER == FOLDED else 1
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    k_here, _, _, _, _, ds_here, kv_full, _, _, ds_full, ds_free = here
    blocks = key_blocks * _WORKERS
    # One element per thread: the counter of its warp, which has the same rows of a block in every program.
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    counters = (turns + thread // 32).to(gl.int64)
    last = counters
    for part in range(PARTS):
        pair, key_block, before = _place(key_blocks, part, SECTION, ORDER)
        mbarrier.wait(kv_full.index(part), 0)
        for own in range((blocks - key_block * _WORKERS) * GROUP):
            block, member = _step(own, key_block, part, blocks, GROUP, ORDER)
            step = before * GROUP + own
            slot = step % _SLOTS
            tile = (pair * GROUP + member) * blocks + block
            turn = counters + tile.to(gl.int64) * (_TURNS * 4)
            seen = thread
            if ORDER != ANY:
                seen = gl.inline_asm_elementwise(_READ_TURN, "=r,l", [turn], dtype=gl.int32, is_pure=False, pack=1)
            mbarrier.wait(ds_full.index(slot), (step // _SLOTS) & 1)
            d_q = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
            d_s = ds_here.index(slot * _WORKERS).permute((1, 0))
            d_q = warpgroup_mma(d_s, k_here.index(part * _WORKERS), d_q, use_acc=False, is_async=True)
            d_s = ds_here.index(slot * _WORKERS + 1).permute((1, 0))
            d_q = warpgroup_mma(d_s, k_here.index(part * _WORKERS + 1), d_q, is_async=True)
            if ORDER != ANY:
                ends = ((thread % 32 == 0) & (step > 0)).to(gl.int32)
                gl.inline_asm_elementwise(_END_TURN, "=r,l,r", [last, ends], dtype=gl.int32, is_pure=False, pack=1)
                last = turn
            d_q = warpgroup_mma_wait(0, deps=[d_q])
            mbarrier.arrive(ds_free.index(slot), count=1)
            # Computed here and not before the loop, to save registers.
            row = gl.arange(0, _SIDE, gl.SliceLayout(1, SUM))[:, None]
            column = gl.arange(0, _WIDTH, gl.SliceLayout(0, SUM))[None, :]
            inner = (((row // 16) * (_WIDTH // 8) + column // 8) * 32 + (row % 8) * 4 + (column % 8) // 2) * 4
            target = sums + tile.to(gl.int64) * (_SIDE * _WIDTH)
            if ORDER != ANY:
                turns_before = _adding_before(block, key_block, part, key_blocks, ORDER)
                wanted = gl.full([128], turns_before, gl.int32, thread.type.layout)
                gl.inline_asm_elementwise(
                    _AWAIT_TURN, "=&r,r,l,r", [seen, turn, wanted], dtype=gl.int32, is_pure=False, pack=1
                )
            gl.inline_asm_elementwise(
                _ADD, _ADD_OPERANDS, [d_q, (target + inner).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=4
            )
    if ORDER != ANY:
        ends = (thread % 32 == 0).to(gl.int32)
        gl.inline_asm_elementwise(_END_TURN, "=r,l,r", [last, ends], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _work(
    here, k, v, d_k, d_v, own, before, part, key_block, blocks, scale,
    WORKER: gl.constexpr, GROUP: gl.constexpr, ORDER: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIDE, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    _, _, q_here, d_out_here, logs_here, ds_here, _, full, free, ds_full, ds_free = here
    nothing = gl.zeros([_SIDE, _SIDE], gl.float32, SCORES)
    step = before * GROUP + own
    stage = step % _STAGES
    slot = step % _SLOTS
    logs = _as_rows(logs_here.index(stage), FLAT)
    mbarrier.wait(full.index(stage), (step // _STAGES) & 1)
    s = warpgroup_mma(k, q_here.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    d_p = warpgroup_mma(v, d_out_here.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    lse = logs.index(0).load(QUERIES)
    s = warpgroup_mma_wait(1, deps=[s])
    x = s * scale - lse[None, :]
    if MASKED:
        block, _ = _step(own, key_block, part, blocks, GROUP, ORDER)
        keys = (key_block * _WORKERS + WORKER) * _SIDE + gl.arange(0, _SIDE, gl.SliceLayout(1, SCORES))
        x = gl.where(keys[:, None] <= (block * _SIDE + gl.arange(0, _SIDE, QUERIES))[None, :], x, -float("inf"))
    p = _exp2(x)
    delta = logs.index(1).load(QUERIES)
    # This wait is here to keep the assembler from moving the wait for d_p above the exponentials.
    mbarrier.wait(ds_free.index(slot), ((step // _SLOTS) & 1) ^ 1)
    d_p, p = warpgroup_mma_wait(0, deps=[d_p, p])
    d_v = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), LEFT), d_out_here.index(stage), d_v, is_async=True)
    d_s = (p * (d_p - delta[None, :])).to(gl.bfloat16)
    d_k = warpgroup_mma(gl.convert_layout(d_s, LEFT), q_here.index(stage), d_k, is_async=True)
    ds_here.index(slot * _WORKERS + WORKER).store(d_s)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot), count=1)
    d_k, d_v = warpgroup_mma_wait(0, deps=[d_k, d_v])
    mbarrier.arrive(free.index(stage), count=1)
    return d_k, d_v


@gluon.jit
def _worker(
    here, out, key_blocks, seq, scale, WORKER: gl.constexpr, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, SECTION: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 2 if ORDER == FOLDED else 1
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIDE, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    # Steps up to the diagonal block, which mask keys.
    MASKED: gl.constexpr = (WORKER + 1) * GROUP
    blocks = key_blocks * _WORKERS
    d_k_out, d_v_out, plain_scale = out
    for part in range(PARTS):
        pair, key_block, before = _place(key_blocks, part, SECTION, ORDER)
        steps = (key_blocks - key_block) * _WORKERS * GROUP
        mbarrier.wait(here[6].index(part), 0)
        k = here[0].index(part * _WORKERS + WORKER).load(LEFT)
        v = here[1].index(part * _WORKERS + WORKER).load(LEFT)
        d_k = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
        d_v = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
        # Steps without masked keys that come first.
        plain = 0
        if ORDER == FIRST_KEYS:
            plain = steps - MASKED
        if ORDER == FOLDED:
            plain = part * (steps - MASKED)
        for own in range(plain):
            d_k, d_v = _work(
                here, k, v, d_k, d_v, own, before, part, key_block, blocks, scale, WORKER, GROUP, ORDER, False
            )
        for own in range(plain, plain + MASKED):
            d_k, d_v = _work(
                here, k, v, d_k, d_v, own, before, part, key_block, blocks, scale, WORKER, GROUP, ORDER, True
            )
        for own in range(plain + MASKED, steps):
            d_k, d_v = _work(
                here, k, v, d_k, d_v, own, before, part, key_block, blocks, scale, WORKER, GROUP, ORDER, False
            )
        row = gl.arange(0, _SIDE, gl.SliceLayout(1, SUM))[:, None]
        column = gl.arange(0, _WIDTH, gl.SliceLayout(0, SUM))[None, :]
        token = pair // KV_HEADS * seq + (key_block * _WORKERS + WORKER) * _SIDE
        first = token.to(gl.int64) * (KV_HEADS * _WIDTH) + pair % KV_HEADS * _WIDTH
        gl.store(d_k_out + first + (row * (KV_HEADS * _WIDTH) + column), (d_k * plain_scale).to(gl.bfloat16))
        gl.store(d_v_out + first + (row * (KV_HEADS * _WIDTH) + column), d_v.to(gl.bfloat16))


@gluon.jit
def _attention_backward(
    q, k, v, d_out, logs, d_k_out, d_v_out, sums, turns, key_blocks, seq, q_head, k_head, v_head, d_out_head, scale, plain_scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 2 if ORDER == FOLDED else 1
    k_here = gl.allocate_shared_memory(gl.bfloat16, [PARTS * _WORKERS, _SIDE, _WIDTH], k.layout)
    v_here = gl.allocate_shared_memory(gl.bfloat16, [PARTS * _WORKERS, _SIDE, _WIDTH], v.layout)
    q_here = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _SIDE, _WIDTH], q.layout)
    d_out_here = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _SIDE, _WIDTH], d_out.layout)
    ds_here = gl.allocate_shared_memory(gl.bfloat16, [_SLOTS * _WORKERS, _SIDE, _SIDE], q.layout)
    logs_here = gl.allocate_shared_memory(gl.float32, [_STAGES, 1, 2 * _SIDE], logs.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    ds_free = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(PARTS):
        mbarrier.init(kv_full.index(part), count=1)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=_WORKERS)
    for slot in gl.static_range(_SLOTS):
        mbarrier.init(ds_full.index(slot), count=_WORKERS)
        mbarrier.init(ds_free.index(slot), count=1)
    fence_async_shared()
    here = (k_here, v_here, q_here, d_out_here, logs_here, ds_here, kv_full, full, free, ds_full, ds_free)
    fetch = (q, k, v, d_out, logs, q_head, k_head, v_head, d_out_head)
    out = (d_k_out, d_v_out, plain_scale)
    gl.warp_specialize([
        (_worker, (here, out, key_blocks, seq, scale, 0, KV_HEADS, GROUP, SECTION, ORDER)),
        (_worker, (here, out, key_blocks, seq, scale, 1, KV_HEADS, GROUP, SECTION, ORDER)),
        (_adder, (here, sums, turns, key_blocks, GROUP, SECTION, ORDER)),
        (_fetcher, (here, fetch, key_blocks, seq, KV_HEADS, GROUP, SECTION, ORDER, _WIDTH, _STAGES)),
    ], [4, 4, 1], [208, 72, 24])  # fmt: skip


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


def attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, *, repeatable: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v [batch, seq, heads, 64]. They are deterministic, bit for bit, if `repeatable`."""
    return start(_attention_backward, _TURNS.value, True, True, d_out, q, k, v, out, lse, scale, repeatable=repeatable)


def start(
    kernel: Any, turns_each: int, by_thread: bool, folds: bool, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    *, repeatable: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run a backward kernel, between the kernel that prepares its sums and the one that writes dQ from them.

    Args:
        turns_each: the kernel's counters per block of queries.
        by_thread: the kernel stores its sums in the order of its threads, not row by row.
        folds: the kernel has the order FOLDED.
    """
    batch, seq, heads, width = q.shape
    kv_heads, side = k.shape[2], _SIDE.value
    d_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    d_k, d_v = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    sums = torch.empty(q.numel(), dtype=torch.float32, device=q.device)
    logs = torch.empty((batch * heads * seq // side, 2 * side), dtype=torch.float32, device=q.device)
    turns = torch.empty(batch * heads * (seq // side) * turns_each, dtype=torch.int32, device=q.device)
    key_blocks = seq // (side * _WORKERS.value)
    tiles = (batch * heads * (seq // side),)
    order = ANY.value
    if repeatable:
        order = order_of(key_blocks, heads // kv_heads if folds else 0, processors(q.device)).value
    programs = key_blocks // 2 if order == FOLDED.value else key_blocks
    _attention_before[tiles](
        out, d_out, lse, logs, sums, turns, seq, heads, *out.stride()[:3], *d_out.stride()[:3], width, side,
        turns_each, num_warps=4,
    )  # fmt: skip
    kernel[(batch * kv_heads * programs,)](
        described(q, side), described(k, side), described(v, side), described(d_out, side),
        TensorDescriptor(logs, list(logs.shape), [2 * side, 1], [1, 2 * side], _LOGS), d_k, d_v, sums, turns, key_blocks, seq,
        q.stride(2), k.stride(2), v.stride(2), d_out.stride(2), scale / math.log(2), scale,
        kv_heads, heads // kv_heads, section(batch * kv_heads, key_blocks), order, num_warps=4,
    )  # fmt: skip
    _attention_after[tiles](sums, d_q, seq, heads, scale, width, side, _WIDTH.value, by_thread, num_warps=4)
    return d_q, d_k, d_v

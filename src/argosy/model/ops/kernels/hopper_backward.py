"""The backward pass of causal attention on Hopper, for heads of 64.

A program has 128 keys of one KV head. It iterates over the queries that see them, 64 of one head at a time, of all heads that share
these keys. The gradients of keys and values are summed in registers and written once. One warp loads, and three groups of four warps
compute. Two workers have 64 keys each and compute

    S = K Q^T    P = exp(S - lse)    dP = V dO^T    dS = P (dP - delta)    dV += P dO    dK += dS Q

They pass dS to the third group, which computes dQ = dS^T K and adds it to sums in memory (`hopper_sums.py`), stored in the order of the
threads' registers. BOUNDED, each key has a last query that sees it.
"""

from __future__ import annotations

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from argosy.model.ops.kernels.hopper_forward import _exp2, _fetch
from argosy.model.ops.kernels.hopper_sums import _add, _units, run_backward
from argosy.model.ops.kernels.hopper_tiles import _SIDE, _WORKERS, TRITON_3_9, _place, _step, _steps, _store_gradients

_WIDTH = gl.constexpr(64)
# Stages of loaded queries, and slots for dS between the workers and the adder.
_STAGES, _SLOTS = gl.constexpr(4), gl.constexpr(4)
# Exponentials are powers of 2.
LSE_FACTOR = -1 / math.log(2)


if TRITON_3_9.value:

    @gluon.jit
    def _as_rows(memory, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
        return memory.reinterpret(gl.float32, [ROWS, COLUMNS], LAYOUT)

else:

    @gluon.jit
    def _as_rows(memory, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
        return memory._reinterpret(gl.float32, [ROWS, COLUMNS], LAYOUT)


@gluon.jit
def _lasts(bounds, sample, block, SCORES: gl.constexpr):
    """Return the last query that sees each of a block of keys."""
    last, last_batch = bounds
    return gl.load(last + sample * last_batch + block * _SIDE + gl.arange(0, _SIDE, gl.SliceLayout(1, SCORES)))


@gluon.jit
def _init_steps(full, free, ds_full, ds_free, STAGES: gl.constexpr, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Initialise the barriers of loaded queries, and those of dS, which both workers write and READERS groups of warps read."""
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=_WORKERS)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ds_full.index(slot), count=_WORKERS)
        mbarrier.init(ds_free.index(slot), count=READERS)


@gluon.jit
def _fetch_keys(here, fetch, pair, key_block, slot, seq, KV_HEADS: gl.constexpr, WIDTH: gl.constexpr):
    """Load a block of keys and values into their slot."""
    k_here, v_here, _, _, _, _, kv_full, _, _, _, _ = here
    _, k, v, _, _, _, k_head, v_head, _ = fetch
    mbarrier.expect(kv_full.index(slot), 2 * _WORKERS * _SIDE * WIDTH * 2)
    for worker in gl.static_range(_WORKERS):
        row = pair // KV_HEADS * seq + (key_block * _WORKERS + worker) * _SIDE
        _fetch(k, [row, pair % KV_HEADS * k_head], kv_full.index(slot), k_here.index(slot * _WORKERS + worker))
        _fetch(v, [row, pair % KV_HEADS * v_head], kv_full.index(slot), v_here.index(slot * _WORKERS + worker))


@gluon.jit
def _fetch_queries(
    here, fetch, step, pair, member, block, seq,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Load a block of queries of a head of the group, their dO and ROWS numbers for each query; return the number of the block and its stage.

    The caller loads the rows beyond the first two.
    """
    _, _, q_here, d_out_here, logs_here, _, _, full, free, _, _ = here
    q, _, _, d_out, logs, q_head, _, _, d_out_head = fetch
    stage = step % STAGES
    head = pair % KV_HEADS * GROUP + member
    row = pair // KV_HEADS * seq + block * _SIDE
    mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), 2 * _SIDE * WIDTH * 2 + ROWS * _SIDE * 4)
    _fetch(q, [row, head * q_head], full.index(stage), q_here.index(stage))
    tile = (pair * GROUP + member) * (seq // _SIDE) + block
    _fetch(logs, [tile, 0], full.index(stage), logs_here.index(stage))
    _fetch(d_out, [row, head * d_out_head], full.index(stage), d_out_here.index(stage))
    return tile, stage


@gluon.jit
def _fetcher(
    here, fetch, bounds, key_blocks, seq, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, BOUNDED: gl.constexpr
):  # fmt: skip
    pair, key_block = _place(key_blocks, SECTION)
    _fetch_keys(here, fetch, pair, key_block, 0, seq, KV_HEADS, _WIDTH)
    for step in range(_steps(bounds, pair // KV_HEADS, key_block, key_blocks, GROUP, BOUNDED)):
        block, member = _step(step, key_block, GROUP)
        _fetch_queries(here, fetch, step, pair, member, block, seq, KV_HEADS, GROUP, _WIDTH, _STAGES, 2)


@gluon.jit
def _adder(
    here, sums, inverse, largest, bounds, key_blocks,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    k_here, _, _, _, _, ds_here, kv_full, _, _, ds_full, ds_free = here
    blocks = key_blocks * _WORKERS
    pair, key_block = _place(key_blocks, SECTION)
    units = _units(largest, pair)
    mbarrier.wait(kv_full.index(0), 0)
    for step in range(_steps(bounds, pair // KV_HEADS, key_block, key_blocks, GROUP, BOUNDED)):
        block, member = _step(step, key_block, GROUP)
        slot = step % _SLOTS
        tile = (pair * GROUP + member) * blocks + block
        factor = units * gl.load(inverse + tile * _SIDE + gl.arange(0, _SIDE, gl.SliceLayout(1, SUM)))
        mbarrier.wait(ds_full.index(slot), (step // _SLOTS) & 1)
        d_q = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
        d_s = ds_here.index(slot * _WORKERS).permute((1, 0))
        d_q = warpgroup_mma(d_s, k_here.index(0), d_q, use_acc=False, is_async=True)
        d_s = ds_here.index(slot * _WORKERS + 1).permute((1, 0))
        d_q = warpgroup_mma(d_s, k_here.index(1), d_q, is_async=True)
        d_q = warpgroup_mma_wait(0, deps=[d_q])
        mbarrier.arrive(ds_free.index(slot), count=1)
        # Computed here and not before the loop, to save registers.
        row = gl.arange(0, _SIDE, gl.SliceLayout(1, SUM))[:, None]
        column = gl.arange(0, _WIDTH, gl.SliceLayout(0, SUM))[None, :]
        inner = ((row // 16) * (_WIDTH // 8) + column // 8) * 128 + (row % 8) * 4 + (column % 8) // 2
        target = sums + tile.to(gl.int64) * (_SIDE * _WIDTH)
        _add(d_q * factor[:, None], (target + inner).to(gl.int64))


@gluon.jit
def _work(
    here, k, v, d_k, d_v, step, block, key_block, lasts, scale, WORKER: gl.constexpr, BOUNDED: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Add what a block of queries, loaded for a step, adds to dK and dV, and pass dS to the adder."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIDE, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    _, _, q_here, d_out_here, logs_here, ds_here, _, full, free, ds_full, ds_free = here
    nothing = gl.zeros([_SIDE, _SIDE], gl.float32, SCORES)
    stage = step % _STAGES
    slot = step % _SLOTS
    logs = _as_rows(logs_here.index(stage), 2, _SIDE, FLAT)
    mbarrier.wait(full.index(stage), (step // _STAGES) & 1)
    s = warpgroup_mma(k, q_here.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    d_p = warpgroup_mma(v, d_out_here.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    minus_lse = logs.index(0).load(QUERIES)
    s = warpgroup_mma_wait(1, deps=[s])
    x = s * scale + minus_lse[None, :]
    if MASKED:
        keys = (key_block * _WORKERS + WORKER) * _SIDE + gl.arange(0, _SIDE, gl.SliceLayout(1, SCORES))
        queries = block * _SIDE + gl.arange(0, _SIDE, QUERIES)
        x = gl.where(keys[:, None] <= queries[None, :], x, -float("inf"))
        if BOUNDED:
            x = gl.where(queries[None, :] <= lasts[:, None], x, -float("inf"))
    p = _exp2(x)
    minus_delta = logs.index(1).load(QUERIES)
    # This wait is here to keep the assembler from moving the wait for d_p above the exponentials.
    mbarrier.wait(ds_free.index(slot), ((step // _SLOTS) & 1) ^ 1)
    d_p, p = warpgroup_mma_wait(0, deps=[d_p, p])
    d_v = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), LEFT), d_out_here.index(stage), d_v, is_async=True)
    d_s = (p * (d_p + minus_delta[None, :])).to(gl.bfloat16)
    d_k = warpgroup_mma(gl.convert_layout(d_s, LEFT), q_here.index(stage), d_k, is_async=True)
    ds_here.index(slot * _WORKERS + WORKER).store(d_s)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot), count=1)
    d_k, d_v = warpgroup_mma_wait(0, deps=[d_k, d_v])
    mbarrier.arrive(free.index(stage), count=1)
    return d_k, d_v


@gluon.jit
def _worker(
    here, out, bounds, key_blocks, seq, scale, WORKER: gl.constexpr, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, SECTION: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIDE, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    pair, key_block = _place(key_blocks, SECTION)
    steps = _steps(bounds, pair // KV_HEADS, key_block, key_blocks, GROUP, BOUNDED)
    # Steps up to the diagonal block, which mask keys; BOUNDED, all steps do.
    masked = (WORKER + 1) * GROUP
    lasts = 0
    if BOUNDED:
        masked = steps
        lasts = _lasts(bounds, pair // KV_HEADS, key_block * _WORKERS + WORKER, SCORES)
    mbarrier.wait(here[6].index(0), 0)
    k = here[0].index(WORKER).load(LEFT)
    v = here[1].index(WORKER)
    if not TRITON_3_9:
        v = v.load(LEFT)
    d_k = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
    d_v = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
    for step in range(masked):
        block, _ = _step(step, key_block, GROUP)
        d_k, d_v = _work(here, k, v, d_k, d_v, step, block, key_block, lasts, scale, WORKER, BOUNDED, True)
    for step in range(masked, steps):
        block, _ = _step(step, key_block, GROUP)
        d_k, d_v = _work(here, k, v, d_k, d_v, step, block, key_block, lasts, scale, WORKER, BOUNDED, False)
    _store_gradients(out, d_k, d_v, pair, key_block, seq, WORKER, KV_HEADS, _WIDTH, SUM)


@gluon.jit
def _attention_backward(
    q, k, v, d_out, logs, d_k_out, d_v_out, sums, inverse, largest, found, last, last_batch,
    key_blocks, seq, q_head, k_head, v_head, d_out_head, d_token, d_head, scale, plain_scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    k_here = gl.allocate_shared_memory(gl.bfloat16, [_WORKERS, _SIDE, _WIDTH], k.layout)
    v_here = gl.allocate_shared_memory(gl.bfloat16, [_WORKERS, _SIDE, _WIDTH], v.layout)
    q_here = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _SIDE, _WIDTH], q.layout)
    d_out_here = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _SIDE, _WIDTH], d_out.layout)
    ds_here = gl.allocate_shared_memory(gl.bfloat16, [_SLOTS * _WORKERS, _SIDE, _SIDE], q.layout)
    logs_here = gl.allocate_shared_memory(gl.float32, [_STAGES, 1, 2 * _SIDE], logs.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    ds_free = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    _init_steps(full, free, ds_full, ds_free, _STAGES, _SLOTS, 1)
    fence_async_shared()
    here = (k_here, v_here, q_here, d_out_here, logs_here, ds_here, kv_full, full, free, ds_full, ds_free)
    fetch = (q, k, v, d_out, logs, q_head, k_head, v_head, d_out_head)
    out = (d_k_out, d_v_out, found, d_token, d_head, plain_scale)
    bounds = (last, last_batch)
    gl.warp_specialize([
        (_worker, (here, out, bounds, key_blocks, seq, scale, 0, KV_HEADS, GROUP, SECTION, BOUNDED)),
        (_worker, (here, out, bounds, key_blocks, seq, scale, 1, KV_HEADS, GROUP, SECTION, BOUNDED)),
        (_adder, (here, sums, inverse, largest, bounds, key_blocks, KV_HEADS, GROUP, SECTION, BOUNDED)),
        (_fetcher, (here, fetch, bounds, key_blocks, seq, KV_HEADS, GROUP, SECTION, BOUNDED)),
    ], [4, 4, 1], [208, 72, 24])  # fmt: skip


def attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, last: Tensor | None, beside: bool,
    measured: bool, summed: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v [batch, seq, heads, 64], given the forward pass's `out` and `lse`.

    Args:
        last: the last query that sees each key, [1 or batch, seq]; None if the last of all sees all.
        beside: write the gradients to parts of one tensor, if q, k and v are such.
        measured: note the largest magnitudes in the gradients.
        summed: note the sums of the gradients over tokens. Each query head must have a KV head of its own.
    """
    return run_backward(
        _attention_backward, d_out, q, k, v, out, lse, scale, last, beside, measured, summed, LSE_FACTOR, by_tiles=False
    )  # fmt: skip

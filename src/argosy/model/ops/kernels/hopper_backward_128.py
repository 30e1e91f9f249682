"""The backward pass of causal attention on Hopper, for heads of 128.

As for heads of 64 (`hopper_backward`), a program has 128 keys of one KV head and iterates over the queries that see them, and two
workers of four warps have 64 keys each. Their sums of dK and dV fill the registers, so there is no room for a third group of warps to
compute dQ = dS^T K. Instead each worker computes half of dQ's columns, over all 128 keys. It reads the other worker's dS from shared
memory one step late, beside its own matmuls for dV and dK, so that neither worker waits for the other. One more warp adds dQ from shared
memory to the sums in memory (`hopper_sums.py`).

All programs start with the last queries: those that run together then read the same queries, and add to the same sums, at about the same
time, and both stay cached. BOUNDED, each key has a last query that sees it.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from argosy.model.ops.kernels.hopper_backward import _as_rows, _fetch_keys, _fetch_queries, _init_steps, _lasts
from argosy.model.ops.kernels.hopper_forward import _exp2, _fetch
from argosy.model.ops.kernels.hopper_sums import _COLUMNS, _add_tile, _rounded, _units, run_backward
from argosy.model.ops.kernels.hopper_tiles import _SIDE, _WORKERS, _place, _recomputed, _step, _steps, _store_gradients

_WIDTH = gl.constexpr(128)
_STAGES, _SLOTS = gl.constexpr(2), gl.constexpr(2)


@gluon.jit
def _fetcher(
    here, adding, fetch, inverse, bounds, key_blocks, seq,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    inverse_here, _, _, _ = adding
    _, _, _, _, _, _, _, full, _, _, _ = here
    pair, key_block = _place(key_blocks, SECTION)
    _fetch_keys(here, fetch, pair, key_block, 0, seq, KV_HEADS, _WIDTH)
    steps = _steps(bounds, pair // KV_HEADS, key_block, key_blocks, GROUP, BOUNDED)
    for step in range(steps):
        block, member = _step(steps - 1 - step, key_block, GROUP)
        tile, stage = _fetch_queries(here, fetch, step, pair, member, block, seq, KV_HEADS, GROUP, _WIDTH, _STAGES, 3)
        _fetch(inverse, [tile, 0], full.index(stage), inverse_here.index(stage))


@gluon.jit
def _adder(
    adding, sums, bounds, key_blocks, seq, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, BOUNDED: gl.constexpr
):  # fmt: skip
    """Add the workers' halves of dQ to the sums of a block of queries."""
    _, dq_here, dq_full, dq_free = adding
    pair, key_block = _place(key_blocks, SECTION)
    steps = _steps(bounds, pair // KV_HEADS, key_block, key_blocks, GROUP, BOUNDED)
    for step in range(steps):
        block, member = _step(steps - 1 - step, key_block, GROUP)
        row = (pair * GROUP + member) * seq + block * _SIDE
        for worker in gl.static_range(_WORKERS):
            mbarrier.wait(dq_full.index(worker), step & 1)
            _add_tile(sums, [row, worker * _COLUMNS], dq_here.index(worker))
        for worker in gl.static_range(_WORKERS):
            tma.store_wait(_WORKERS - 1 - worker)
            mbarrier.arrive(dq_free.index(worker), count=1)


@gluon.jit
def _late_product(here, slot, WORKER: gl.constexpr):
    """Start the matmul for dQ of the step whose dS is in a slot: this worker's half of the columns, over all keys."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 16])
    k_here, _, _, _, _, ds_here, _, _, _, _, _ = here
    d_q = gl.zeros([_SIDE, _COLUMNS], gl.float32, SUM)
    for part in gl.static_range(_WORKERS):
        keys = k_here.index(_recomputed(part)).slice(WORKER * _COLUMNS, _COLUMNS, dim=1)
        d_s = ds_here.index(slot * _WORKERS + part).permute((1, 0))
        d_q = warpgroup_mma(d_s, keys, d_q, use_acc=part > 0, is_async=True)
    return d_q


@gluon.jit
def _hand_over(d_q, factors, step, adding, WORKER: gl.constexpr):
    """Pass a step's dQ, in units, to the warp that adds it."""
    _, dq_here, dq_full, dq_free = adding
    d_q = _rounded(d_q * factors[:, None])
    mbarrier.wait(dq_free.index(WORKER), (step & 1) ^ 1)
    dq_here.index(WORKER).store(d_q)
    fence_async_shared()
    mbarrier.arrive(dq_full.index(WORKER), count=1)


@gluon.jit
def _masked(x, block, key_block, lasts, WORKER: gl.constexpr, BOUNDED: gl.constexpr):
    """Return the scores of a block of queries without those of keys that they do not see."""
    keys = (key_block * _WORKERS + WORKER) * _SIDE + gl.arange(0, _SIDE, gl.SliceLayout(1, x.type.layout))
    queries = block * _SIDE + gl.arange(0, _SIDE, gl.SliceLayout(0, x.type.layout))
    x = gl.where(keys[:, None] <= queries[None, :], x, -float("inf"))
    if BOUNDED:
        x = gl.where(queries[None, :] <= lasts[:, None], x, -float("inf"))
    return x


@gluon.jit
def _work(
    here, adding, d_k, d_v, late_factors, units, step, steps, key_block, lasts, scale,
    WORKER: gl.constexpr, GROUP: gl.constexpr, BOUNDED: gl.constexpr, MASKED: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIDE, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_here, v_here, q_here, d_out_here, logs_here, ds_here, _, full, free, ds_full, ds_free = here
    inverse_here, _, _, _ = adding
    stage = step % _STAGES
    slot = step % _SLOTS
    late = step - 1
    logs = _as_rows(logs_here.index(stage), 2, _SIDE, FLAT)
    # Both accumulators start with what is added to them, which then needs no registers of its own.
    nothing = gl.zeros([_SIDE, _SIDE], gl.float32, SCORES)
    mbarrier.wait(full.index(stage), (step // _STAGES) & 1)
    s = nothing + logs.index(0).load(QUERIES)[None, :]
    s = warpgroup_mma(k_here.index(_recomputed(WORKER)), q_here.index(stage).permute((1, 0)), s, is_async=True)
    d_p = nothing + logs.index(1).load(QUERIES)[None, :]
    d_p = warpgroup_mma(v_here.index(_recomputed(WORKER)), d_out_here.index(stage).permute((1, 0)), d_p, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    x = s * scale
    if MASKED:
        block, _ = _step(steps - 1 - step, key_block, GROUP)
        x = _masked(x, block, key_block, lasts, WORKER, BOUNDED)
    p = _exp2(x)
    mbarrier.wait(ds_free.index(slot), ((step // _SLOTS) & 1) ^ 1)
    d_p, p = warpgroup_mma_wait(0, deps=[d_p, p])
    d_v = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), LEFT), d_out_here.index(stage), d_v, is_async=True)
    d_s = (p * d_p).to(gl.bfloat16)
    d_k = warpgroup_mma(gl.convert_layout(d_s, LEFT), q_here.index(stage), d_k, is_async=True)
    ds_here.index(slot * _WORKERS + WORKER).store(d_s)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot), count=1)
    inverse = _as_rows(inverse_here.index(stage), 1, _SIDE, FLAT).index(0)
    factors = inverse.load(gl.SliceLayout(1, late_factors.type.layout.parent)) * units
    if FIRST:
        d_k, d_v = warpgroup_mma_wait(0, deps=[d_k, d_v])
        mbarrier.arrive(free.index(stage), count=1)
    else:
        mbarrier.wait(ds_full.index(late % _SLOTS), (late // _SLOTS) & 1)
        d_q = _late_product(here, late % _SLOTS, WORKER)
        d_k, d_v, d_q = warpgroup_mma_wait(0, deps=[d_k, d_v, d_q])
        mbarrier.arrive(free.index(stage), count=1)
        mbarrier.arrive(ds_free.index(late % _SLOTS), count=1)
        _hand_over(d_q, late_factors, late, adding, WORKER)
    return d_k, d_v, factors


@gluon.jit
def _worker(
    here, adding, out, largest, bounds, key_blocks, seq, scale, WORKER: gl.constexpr, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, SECTION: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 16])
    pair, key_block = _place(key_blocks, SECTION)
    steps = _steps(bounds, pair // KV_HEADS, key_block, key_blocks, GROUP, BOUNDED)
    units = _units(largest, pair)
    lasts = 0
    if BOUNDED:
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIDE, 16])
        lasts = _lasts(bounds, pair // KV_HEADS, key_block * _WORKERS + WORKER, SCORES)
    mbarrier.wait(here[6].index(0), 0)
    d_k = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
    d_v = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
    factors = gl.zeros([_SIDE], gl.float32, gl.SliceLayout(1, HALF))
    # The step from which on keys are masked: that of the diagonal block; BOUNDED, all steps do.
    masked = gl.maximum(1, steps - (WORKER + 1) * GROUP)
    if BOUNDED:
        masked = 1
    d_k, d_v, factors = _work(
        here, adding, d_k, d_v, factors, units, 0, steps, key_block, lasts, scale, WORKER, GROUP, BOUNDED, True, True
    )  # fmt: skip
    for step in range(1, masked):
        d_k, d_v, factors = _work(
            here, adding, d_k, d_v, factors, units, step, steps, key_block, lasts, scale, WORKER, GROUP, BOUNDED, False, False
        )  # fmt: skip
    for step in range(masked, steps):
        d_k, d_v, factors = _work(
            here, adding, d_k, d_v, factors, units, step, steps, key_block, lasts, scale, WORKER, GROUP, BOUNDED, True, False
        )  # fmt: skip
    last = steps - 1
    mbarrier.wait(here[9].index(last % _SLOTS), (last // _SLOTS) & 1)
    d_q = _late_product(here, last % _SLOTS, WORKER)
    d_q = warpgroup_mma_wait(0, deps=[d_q])
    _hand_over(d_q, factors, last, adding, WORKER)
    _store_gradients(out, d_k, d_v, pair, key_block, seq, WORKER, KV_HEADS, _WIDTH, SUM)


@gluon.jit
def _attention_backward_128(
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
    inverse_here = gl.allocate_shared_memory(gl.float32, [_STAGES, 1, _SIDE], inverse.layout)
    dq_here = gl.allocate_shared_memory(gl.int32, [_WORKERS, _SIDE, _COLUMNS], sums.layout)
    dq_full = gl.allocate_shared_memory(gl.int64, [_WORKERS, 1], mbarrier.MBarrierLayout())
    dq_free = gl.allocate_shared_memory(gl.int64, [_WORKERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for worker in gl.static_range(_WORKERS):
        mbarrier.init(dq_full.index(worker), count=1)
        mbarrier.init(dq_free.index(worker), count=1)
    _init_steps(full, free, ds_full, ds_free, _STAGES, _SLOTS, _WORKERS)
    fence_async_shared()
    here = (k_here, v_here, q_here, d_out_here, logs_here, ds_here, kv_full, full, free, ds_full, ds_free)
    fetch = (q, k, v, d_out, logs, q_head, k_head, v_head, d_out_head)
    out = (d_k_out, d_v_out, found, d_token, d_head, plain_scale)
    adding = (inverse_here, dq_here, dq_full, dq_free)
    bounds = (last, last_batch)
    gl.warp_specialize([
        (_worker, (here, adding, out, largest, bounds, key_blocks, seq, scale, 0, KV_HEADS, GROUP, SECTION, BOUNDED)),
        (_worker, (here, adding, out, largest, bounds, key_blocks, seq, scale, 1, KV_HEADS, GROUP, SECTION, BOUNDED)),
        (_adder, (adding, sums, bounds, key_blocks, seq, KV_HEADS, GROUP, SECTION, BOUNDED)),
        (_fetcher, (here, adding, fetch, inverse, bounds, key_blocks, seq, KV_HEADS, GROUP, SECTION, BOUNDED)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


def attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, last: Tensor | None, beside: bool,
    measured: bool, summed: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `hopper_backward.attend_backward` does, for [batch, seq, heads, 128]."""
    return run_backward(
        _attention_backward_128, d_out, q, k, v, out, lse, scale, last, beside, measured, summed, -1 / scale, by_tiles=True
    )  # fmt: skip

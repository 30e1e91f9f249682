"""The backward pass of causal attention on Hopper, for heads of 128.

As for heads of 64 (`hopper_backward`), a program has 128 keys of one KV head and iterates over the queries that see them, and two
workers of four warps have 64 keys each. Their sums of dK and dV fill the registers, so there is no room for a third group of warps to
compute dQ = dS^T K. Instead each worker computes half of dQ's columns, over all 128 keys. It reads the other worker's dS from shared
memory one step late, beside the scores of the next step, so that neither worker waits for the other. Two more warps read dQ from shared
memory and add it to the sum in memory. In deterministic mode they add in an order of `hopper_order`. BOUNDED, each key has a last
query that sees it.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from argosy.model.ops.kernels.hopper_backward import _ADD, _ADD_OPERANDS, _as_rows, _fetcher, _lasts
from argosy.model.ops.kernels.hopper_forward import _exp2
from argosy.model.ops.kernels.hopper_order import (
    _AWAIT_TURN,
    _END_TURN,
    _READ_TURN,
    _SIDE,
    _WORKERS,
    ANY,
    FIRST_KEYS,
    _adding_before,
    _place,
    _step,
    _steps,
)
from argosy.model.ops.kernels.hopper_sums import BackwardKernel

_WIDTH, _HALF = gl.constexpr(128), gl.constexpr(64)
_STAGES, _SLOTS = gl.constexpr(2), gl.constexpr(2)
# Counters per block of queries: one for each warp that adds.
_TURNS = gl.constexpr(2)


@gluon.jit
def _late_product(here, slot, WORKER: gl.constexpr):
    """Start the matmul for dQ of the step whose dS is in a slot: this worker's half of the columns, over all keys."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    k_here, _, _, _, _, ds_here, _, _, _, _, _ = here
    d_q = gl.zeros([_SIDE, _HALF], gl.float32, SUM)
    for part in gl.static_range(_WORKERS):
        keys = k_here.index(part).slice(WORKER * _HALF, _HALF, dim=1)
        d_s = ds_here.index(slot * _WORKERS + part).permute((1, 0))
        d_q = warpgroup_mma(d_s, keys, d_q, use_acc=part > 0, is_async=True)
    return d_q


@gluon.jit
def _adder(
    adding, sums, turns, bounds, key_blocks,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, ORDER: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Add the workers' halves of dQ to the sums of a block of queries, stored as [half of the columns, query, column]."""
    dq_here, dq_full, dq_free = adding
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [2, 1], [1, 0])
    pair, key_block, _ = _place(key_blocks, 0, SECTION, ORDER)
    blocks = key_blocks * _WORKERS
    # One element per thread: the counter of its warp, which has the same rows of a block in every program.
    thread = gl.arange(0, 64, gl.BlockedLayout([1], [32], [2], [0]))
    counters = (turns + thread // 32).to(gl.int64)
    last = counters
    row = gl.arange(0, 8, gl.SliceLayout(1, ROWS))[:, None]
    column = gl.arange(0, _HALF, gl.SliceLayout(0, ROWS))[None, :]
    inner = (row * _HALF + column) * 4
    for step in range(_steps(bounds, pair // KV_HEADS, key_block, key_blocks, GROUP, BOUNDED)):
        block, member = _step(step, key_block, 0, blocks, GROUP, ORDER)
        tile = (pair * GROUP + member) * blocks + block
        turn = counters + tile.to(gl.int64) * (_TURNS * 4)
        target = sums.to(gl.int64) + tile.to(gl.int64) * (_SIDE * _WIDTH * 4)
        if ORDER != ANY:
            seen = gl.inline_asm_elementwise(_READ_TURN, "=r,l", [turn], dtype=gl.int32, is_pure=False, pack=1)
            ends = ((thread % 32 == 0) & (step > 0)).to(gl.int32)
            gl.inline_asm_elementwise(_END_TURN, "=r,l,r", [last, ends], dtype=gl.int32, is_pure=False, pack=1)
            last = turn
            before = gl.full([64], _adding_before(block, key_block, 0, key_blocks, ORDER), gl.int32, thread.type.layout)
            gl.inline_asm_elementwise(
                _AWAIT_TURN, "=&r,r,l,r", [seen, turn, before], dtype=gl.int32, is_pure=False, pack=1
            )
        for worker in gl.static_range(_WORKERS):
            mbarrier.wait(dq_full.index(worker), step & 1)
            for chunk in gl.static_range(_SIDE // 8):
                values = dq_here.index(worker).slice(chunk * 8, 8, dim=0).load(ROWS)
                places = target + (worker * _SIDE + chunk * 8) * (_HALF * 4) + inner
                gl.inline_asm_elementwise(_ADD, _ADD_OPERANDS, [values, places], dtype=gl.int32, is_pure=False, pack=4)
            mbarrier.arrive(dq_free.index(worker), count=1)
    if ORDER != ANY:
        ends = (thread % 32 == 0).to(gl.int32)
        gl.inline_asm_elementwise(_END_TURN, "=r,l,r", [last, ends], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _hand_over(d_q, step, adding, WORKER: gl.constexpr):
    """Pass a step's dQ to the warps that add it."""
    dq_here, dq_full, dq_free = adding
    mbarrier.wait(dq_free.index(WORKER), (step & 1) ^ 1)
    dq_here.index(WORKER).store(d_q)
    mbarrier.arrive(dq_full.index(WORKER), count=1)


@gluon.jit
def _work(
    here, adding, d_k, d_v, step, key_block, blocks, lasts, scale,
    WORKER: gl.constexpr, GROUP: gl.constexpr, ORDER: gl.constexpr, BOUNDED: gl.constexpr, MASKED: gl.constexpr,
    FIRST: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIDE, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_here, v_here, q_here, d_out_here, logs_here, ds_here, _, full, free, ds_full, ds_free = here
    nothing = gl.zeros([_SIDE, _SIDE], gl.float32, SCORES)
    stage = step % _STAGES
    slot = step % _SLOTS
    late = step - 1
    logs = _as_rows(logs_here.index(stage), FLAT)
    mbarrier.wait(full.index(stage), (step // _STAGES) & 1)
    # Both accumulators start with the value to subtract, which then needs no registers of its own.
    s = nothing - (logs.index(0).load(QUERIES) / scale)[None, :]
    s = warpgroup_mma(k_here.index(WORKER), q_here.index(stage).permute((1, 0)), s, is_async=True)
    if FIRST:
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        mbarrier.wait(ds_full.index(late % _SLOTS), (late // _SLOTS) & 1)
        d_q = _late_product(here, late % _SLOTS, WORKER)
        s = warpgroup_mma_wait(2, deps=[s])
    x = s * scale
    if MASKED:
        block, _ = _step(step, key_block, 0, blocks, GROUP, ORDER)
        keys = (key_block * _WORKERS + WORKER) * _SIDE + gl.arange(0, _SIDE, gl.SliceLayout(1, SCORES))
        queries = block * _SIDE + gl.arange(0, _SIDE, QUERIES)
        x = gl.where(keys[:, None] <= queries[None, :], x, -float("inf"))
        if BOUNDED:
            x = gl.where(queries[None, :] <= lasts[:, None], x, -float("inf"))
    p = _exp2(x)
    if not FIRST:
        d_q, p = warpgroup_mma_wait(0, deps=[d_q, p])
        mbarrier.arrive(ds_free.index(late % _SLOTS), count=1)
    if not FIRST:
        _hand_over(d_q, late, adding, WORKER)
    d_p = nothing - logs.index(1).load(QUERIES)[None, :]
    d_p = warpgroup_mma(v_here.index(WORKER), d_out_here.index(stage).permute((1, 0)), d_p, is_async=True)
    mbarrier.wait(ds_free.index(slot), ((step // _SLOTS) & 1) ^ 1)
    d_p, p = warpgroup_mma_wait(0, deps=[d_p, p])
    d_v = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), LEFT), d_out_here.index(stage), d_v, is_async=True)
    d_s = (p * d_p).to(gl.bfloat16)
    d_k = warpgroup_mma(gl.convert_layout(d_s, LEFT), q_here.index(stage), d_k, is_async=True)
    ds_here.index(slot * _WORKERS + WORKER).store(d_s)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot), count=1)
    d_k, d_v = warpgroup_mma_wait(0, deps=[d_k, d_v])
    mbarrier.arrive(free.index(stage), count=1)
    return d_k, d_v


@gluon.jit
def _worker(
    here, adding, out, bounds, key_blocks, seq, scale, WORKER: gl.constexpr, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, SECTION: gl.constexpr, ORDER: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    pair, key_block, _ = _place(key_blocks, 0, SECTION, ORDER)
    steps = _steps(bounds, pair // KV_HEADS, key_block, key_blocks, GROUP, BOUNDED)
    lasts = 0
    if BOUNDED:
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIDE, 16])
        lasts = _lasts(bounds, pair // KV_HEADS, key_block * _WORKERS + WORKER, SCORES)
    mbarrier.wait(here[6].index(0), 0)
    d_k = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
    d_v = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
    blocks = key_blocks * _WORKERS
    # Steps up to the diagonal block, which mask keys; BOUNDED, all steps do.
    MASKED_STEPS: gl.constexpr = (WORKER + 1) * GROUP
    # Where the steps that come first, without masked keys, end. Step 0 always masks.
    plain = 1
    if ORDER == FIRST_KEYS:
        plain = gl.maximum(steps - MASKED_STEPS, 1)
    d_k, d_v = _work(
        here, adding, d_k, d_v, 0, key_block, blocks, lasts, scale, WORKER, GROUP, ORDER, BOUNDED, True, True
    )
    for step in range(1, plain):
        d_k, d_v = _work(
            here, adding, d_k, d_v, step, key_block, blocks, lasts, scale, WORKER, GROUP, ORDER, BOUNDED, False, False
        )
    masked = gl.minimum(plain + MASKED_STEPS, steps)
    if BOUNDED:
        masked = steps
    for step in range(plain, masked):
        d_k, d_v = _work(
            here, adding, d_k, d_v, step, key_block, blocks, lasts, scale, WORKER, GROUP, ORDER, BOUNDED, True, False
        )
    for step in range(masked, steps):
        d_k, d_v = _work(
            here, adding, d_k, d_v, step, key_block, blocks, lasts, scale, WORKER, GROUP, ORDER, BOUNDED, False, False
        )
    last = steps - 1
    mbarrier.wait(here[9].index(last % _SLOTS), (last // _SLOTS) & 1)
    d_q = _late_product(here, last % _SLOTS, WORKER)
    d_q = warpgroup_mma_wait(0, deps=[d_q])
    _hand_over(d_q, last, adding, WORKER)
    d_k_out, d_v_out, plain_scale = out
    row = gl.arange(0, _SIDE, gl.SliceLayout(1, SUM))[:, None]
    column = gl.arange(0, _WIDTH, gl.SliceLayout(0, SUM))[None, :]
    token = pair // KV_HEADS * seq + (key_block * _WORKERS + WORKER) * _SIDE
    first = token.to(gl.int64) * (KV_HEADS * _WIDTH) + pair % KV_HEADS * _WIDTH
    gl.store(d_k_out + first + (row * (KV_HEADS * _WIDTH) + column), (d_k * plain_scale).to(gl.bfloat16))
    gl.store(d_v_out + first + (row * (KV_HEADS * _WIDTH) + column), d_v.to(gl.bfloat16))


@gluon.jit
def _attention_backward_128(
    q, k, v, d_out, logs, d_k_out, d_v_out, sums, turns, last, last_batch,
    key_blocks, seq, q_head, k_head, v_head, d_out_head, scale, plain_scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, ORDER: gl.constexpr, BOUNDED: gl.constexpr,
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
    dq_here = gl.allocate_shared_memory(gl.float32, [_WORKERS, _SIDE, _HALF], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    dq_full = gl.allocate_shared_memory(gl.int64, [_WORKERS, 1], mbarrier.MBarrierLayout())
    dq_free = gl.allocate_shared_memory(gl.int64, [_WORKERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for worker in gl.static_range(_WORKERS):
        mbarrier.init(dq_full.index(worker), count=1)
        mbarrier.init(dq_free.index(worker), count=1)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=_WORKERS)
    for slot in gl.static_range(_SLOTS):
        mbarrier.init(ds_full.index(slot), count=_WORKERS)
        mbarrier.init(ds_free.index(slot), count=_WORKERS)
    fence_async_shared()
    here = (k_here, v_here, q_here, d_out_here, logs_here, ds_here, kv_full, full, free, ds_full, ds_free)
    fetch = (q, k, v, d_out, logs, q_head, k_head, v_head, d_out_head)
    out = (d_k_out, d_v_out, plain_scale)
    adding = (dq_here, dq_full, dq_free)
    bounds = (last, last_batch)
    gl.warp_specialize([
        (_worker, (here, adding, out, bounds, key_blocks, seq, scale, 0, KV_HEADS, GROUP, SECTION, ORDER, BOUNDED)),
        (_worker, (here, adding, out, bounds, key_blocks, seq, scale, 1, KV_HEADS, GROUP, SECTION, ORDER, BOUNDED)),
        (_adder, (adding, sums, turns, bounds, key_blocks, KV_HEADS, GROUP, SECTION, ORDER, BOUNDED)),
        (_fetcher, (here, fetch, bounds, key_blocks, seq, KV_HEADS, GROUP, SECTION, ORDER, BOUNDED, _WIDTH, _STAGES)),
    ], [4, 2, 1], [240, 32, 32])  # fmt: skip


def attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, last: Tensor | None,
    *, repeatable: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `hopper_backward.attend_backward` does, for [batch, seq, heads, 128]."""
    how = BackwardKernel(_attention_backward_128, _TURNS.value, by_thread=False, folds=False)
    return how.run(d_out, q, k, v, out, lse, scale, last, repeatable=repeatable)

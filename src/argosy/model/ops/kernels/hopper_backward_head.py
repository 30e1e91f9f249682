"""The backward pass of causal attention on Hopper, for heads of 64, where there are so many KV heads that each can be one program's.

A program is persistent, and takes KV heads from an atomic counter as the forward pass takes tiles. It has all keys of a head, 128 at a time,
the last ones first, and computes with them what a program of `hopper_backward` does. But no other program adds to the same dQ: the third
group of warps has its sums, of floats, in a scratch of the program, and writes dQ when it has added the part of the first keys. So nothing is
zeroed before, rounded after or bounded, and each sum has one order.

The scratch and the queries should stay in the L2 cache, so the program goes through the queries of a head in both directions in turn: from
the diagonal to the last, and with the keys before from the last to the diagonal.
"""

from __future__ import annotations

import math

import torch
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

from argosy.model.ops.kernels.hopper_backward import (
    _SLOTS,
    _STAGES,
    _WIDTH,
    LSE_FACTOR,
    _fetch_keys,
    _fetch_queries,
    _init_steps,
    _lasts,
    _work,
)
from argosy.model.ops.kernels.hopper_forward import _write, bound, described
from argosy.model.ops.kernels.hopper_scheduler import _make_scheduler, _publish_tile, _published_tile
from argosy.model.ops.kernels.hopper_scratch import _ADD, _STORE, _keep_sum, _load_sum
from argosy.model.ops.kernels.hopper_sums import LOGS, TokenSums, noted_together, prepare, room_beside, tiled
from argosy.model.ops.kernels.hopper_tiles import _FOUND, _SIDE, _WORKERS, TRITON_3_9, _end, _magnitudes, _raise_found
from argosy.model.ops.matmul import processors

# Slots for blocks of keys and values: the current and the next.
_KEY_SLOTS = gl.constexpr(2)


@gluon.jit
def _key_block(turn, key_blocks):
    """Return the block of keys at a turn of a head, and whether to go up through the queries."""
    return key_blocks - 1 - turn, turn % 2 == 0


@gluon.jit
def _visit(step, first, end, up, GROUP: gl.constexpr):
    """Return the block of queries and the head of the group at a step, from the diagonal on or back to it."""
    block = first + step // GROUP
    if not up:
        block = end - 1 - step // GROUP
    return block, step % GROUP


@gluon.jit
def _turns_of_sum(block, first, complete):
    """Return whether these keys are the first and whether they are the last whose part is added to a block of queries.

    Keys are visited from the last to the first. Of those that a query sees the diagonal's are the last.

    Args:
        first: the diagonal's first block of queries.
        complete: the first block of queries that sees no earlier keys.
    """
    return block < first + _WORKERS, block >= complete


@gluon.jit
def _fetcher(
    here, kv_free, scheduler, head_counter, fetch, bounds, pairs, key_blocks, seq,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    # Heads, and blocks of keys and of queries so far.
    heads = 0
    key_count = 0
    count = 0
    pair = gl.atomic_add(head_counter, 1, sem="relaxed")
    while pair < pairs:
        # A tile of the scheduler is a head here.
        _publish_tile(pair, heads, scheduler)
        for turn in range(key_blocks):
            key_block, up = _key_block(turn, key_blocks)
            first = key_block * _WORKERS
            end = _end(bounds, pair // KV_HEADS, key_block, key_blocks, BOUNDED)
            slot = key_count % _KEY_SLOTS
            mbarrier.wait(kv_free.index(slot), ((key_count // _KEY_SLOTS) & 1) ^ 1)
            _fetch_keys(here, fetch, pair, key_block, slot, seq, KV_HEADS, _WIDTH)
            key_count += 1
            for step in range((end - first) * GROUP):
                block, member = _visit(step, first, end, up, GROUP)
                _fetch_queries(here, fetch, count, pair, member, block, seq, KV_HEADS, GROUP, _WIDTH, _STAGES, 2)
                count += 1
        heads += 1
        pair = gl.atomic_add(head_counter, 1, sem="relaxed")
    _publish_tile(pair, heads, scheduler)


@gluon.jit
def _thread_columns(x):
    """Return the sums of the two rows that a thread has of each column of a warp's 16 rows."""
    return gl.sum(x.reshape([_SIDE // 16, 2, 8, _WIDTH]), 1)


@gluon.jit
def _write_queries(adding, d_q, pair, member, block, seq, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Begin to write dQ of a block of queries, and raise one of the maxima of all gradients, if these are wanted."""
    _, _, d_q_out, d_q_here, d_q_head, found, scale = adding
    d_q = (d_q * scale).to(gl.bfloat16)
    tma.store_wait(0)
    d_q_here.store(d_q)
    fence_async_shared()
    row = pair // KV_HEADS * seq + block * _SIDE
    _write(d_q_out, [row, (pair % KV_HEADS * GROUP + member) * d_q_head], d_q_here)
    if found is not None:
        _raise_found(found, block + pair, _magnitudes(d_q))


@gluon.jit
def _adder(
    here, kv_free, scheduler, adding, bounds, pairs, key_blocks, seq,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Add dQ to the sums of this program, and write it."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    sums, query_sums, _, _, _, _, scale = adding
    k_here, _, _, _, _, ds_here, kv_full, _, _, ds_full, ds_free = here
    blocks = key_blocks * _WORKERS
    sums += gl.program_id(0).to(gl.int64) * (GROUP * blocks * _SIDE * _WIDTH)
    heads = 0
    key_count = 0
    count = 0
    pair = _published_tile(heads, scheduler)
    while pair < pairs:
        if query_sums is not None:
            total = gl.zeros_like(_thread_columns(gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)))
        for turn in range(key_blocks):
            key_block, up = _key_block(turn, key_blocks)
            first = key_block * _WORKERS
            end = _end(bounds, pair // KV_HEADS, key_block, key_blocks, BOUNDED)
            complete = first
            if key_block > 0:
                complete = _end(bounds, pair // KV_HEADS, key_block - 1, key_blocks, BOUNDED)
            slot = key_count % _KEY_SLOTS
            mbarrier.wait(kv_full.index(slot), (key_count // _KEY_SLOTS) & 1)
            for step in range((end - first) * GROUP):
                block, member = _visit(step, first, end, up, GROUP)
                target = sums + (member * blocks + block) * (_SIDE * _WIDTH)
                begins, ends = _turns_of_sum(block, first, complete)
                d_q = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
                if ends and not begins:
                    d_q = _load_sum(target, SUM)
                place = count % _SLOTS
                mbarrier.wait(ds_full.index(place), (count // _SLOTS) & 1)
                for worker in gl.static_range(_WORKERS):
                    d_s = ds_here.index(place * _WORKERS + worker).permute((1, 0))
                    d_q = warpgroup_mma(d_s, k_here.index(slot * _WORKERS + worker), d_q, is_async=True)
                d_q = warpgroup_mma_wait(0, deps=[d_q])
                mbarrier.arrive(ds_free.index(place), count=1)
                count += 1
                if ends:
                    if query_sums is not None:
                        total += _thread_columns(d_q)
                    _write_queries(adding, d_q, pair, member, block, seq, KV_HEADS, GROUP)
                elif begins:
                    _keep_sum(d_q, target, _STORE, SUM)
                else:
                    _keep_sum(d_q, target, _ADD, SUM)
            mbarrier.arrive(kv_free.index(slot), count=1)
            key_count += 1
        if query_sums is not None:
            columns = gl.sum(gl.sum(total, 1), 0) * scale
            gl.store(query_sums + pair * _WIDTH + gl.arange(0, _WIDTH, columns.type.layout), columns)
        heads += 1
        pair = _published_tile(heads, scheduler)
    tma.store_wait(0)


@gluon.jit
def _pass_over(here, count, steps, WORKER: gl.constexpr):
    """Let steps pass whose queries see none of this worker's keys: dS is zero. Return the number of steps so far."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIDE, 16])
    _, _, _, _, _, ds_here, _, full, free, ds_full, ds_free = here
    for step in range(count, count + steps):
        stage = step % _STAGES
        slot = step % _SLOTS
        mbarrier.wait(full.index(stage), (step // _STAGES) & 1)
        mbarrier.arrive(free.index(stage), count=1)
        mbarrier.wait(ds_free.index(slot), ((step // _SLOTS) & 1) ^ 1)
        ds_here.index(slot * _WORKERS + WORKER).store(gl.zeros([_SIDE, _SIDE], gl.bfloat16, SCORES))
        fence_async_shared()
        mbarrier.arrive(ds_full.index(slot), count=1)
    return count + steps


@gluon.jit
def _diagonal(
    here, k, v, d_k, d_v, count, up, key_block, lasts, scale, WORKER: gl.constexpr, GROUP: gl.constexpr, BOUNDED: gl.constexpr
):  # fmt: skip
    """Work on the blocks of queries up to that of the worker's keys; return the sums and the number of steps so far."""
    # The first block sees none of the second worker's keys. With several heads it multiplies all the same: else it would run ahead of the
    # first worker, and wait for it later.
    UNSEEN: gl.constexpr = WORKER if GROUP == 1 else 0
    first = key_block * _WORKERS
    before = UNSEEN
    if not up:
        before = 0
    count = _pass_over(here, count, before, WORKER)
    for step in range((WORKER + 1 - UNSEEN) * GROUP):
        block = first + UNSEEN + step // GROUP
        if not up:
            block = first + WORKER - step // GROUP
        d_k, d_v = _work(here, k, v, d_k, d_v, count, block, key_block, lasts, scale, WORKER, BOUNDED, True)
        count += 1
    count = _pass_over(here, count, UNSEEN - before, WORKER)
    return d_k, d_v, count


@gluon.jit
def _rest(
    here, k, v, d_k, d_v, count, end, up, key_block, lasts, scale, WORKER: gl.constexpr, GROUP: gl.constexpr, BOUNDED: gl.constexpr
):  # fmt: skip
    """Work on the other blocks of queries. They see all keys, unless BOUNDED."""
    first = key_block * _WORKERS + WORKER + 1
    after = count + (end - first) * GROUP
    for step in range(count, after):
        block = first + (step - count) // GROUP
        if not up:
            block = end - 1 - (step - count) // GROUP
        d_k, d_v = _work(here, k, v, d_k, d_v, step, block, key_block, lasts, scale, WORKER, BOUNDED, BOUNDED)
    return d_k, d_v, after


@gluon.jit
def _write_gradients(here, out, d_k, d_v, pair, key_block, slot, seq, WORKER: gl.constexpr, KV_HEADS: gl.constexpr):
    """Begin to write the gradients of a worker's keys and values, and raise one of the maxima of all gradients, if these are wanted.

    They leave by shared memory: dV by the place of the values, which no matmul reads any more."""
    d_k_out, d_v_out, d_k_here, d_k_head, d_v_head, found, scale = out
    d_k = (d_k * scale).to(gl.bfloat16)
    d_v = d_v.to(gl.bfloat16)
    d_v_here = here[1].index(slot * _WORKERS + WORKER)
    d_v_here.store(d_v)
    d_k_here.index(WORKER).store(d_k)
    fence_async_shared()
    row = pair // KV_HEADS * seq + (key_block * _WORKERS + WORKER) * _SIDE
    _write(d_v_out, [row, pair % KV_HEADS * d_v_head], d_v_here)
    _write(d_k_out, [row, pair % KV_HEADS * d_k_head], d_k_here.index(WORKER))
    if found is not None:
        of_k = _magnitudes(d_k)
        of_v = _magnitudes(d_v)
        _raise_found(found, key_block + pair, gl.maximum(of_k, of_v))


@gluon.jit
def _worker(
    here, kv_free, scheduler, out, bounds, pairs, key_blocks, seq, scale,
    WORKER: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIDE, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    k_here, v_here, _, _, _, _, kv_full, _, _, _, _ = here
    heads = 0
    key_count = 0
    count = 0
    pair = _published_tile(heads, scheduler)
    while pair < pairs:
        for turn in range(key_blocks):
            key_block, up = _key_block(turn, key_blocks)
            end = _end(bounds, pair // KV_HEADS, key_block, key_blocks, BOUNDED)
            lasts = 0
            if BOUNDED:
                lasts = _lasts(bounds, pair // KV_HEADS, key_block * _WORKERS + WORKER, SCORES)
            slot = key_count % _KEY_SLOTS
            mbarrier.wait(kv_full.index(slot), (key_count // _KEY_SLOTS) & 1)
            k = k_here.index(slot * _WORKERS + WORKER).load(LEFT)
            v = v_here.index(slot * _WORKERS + WORKER)
            if not TRITON_3_9:
                v = v.load(LEFT)
            # By now the gradients of the keys before have left shared memory.
            if key_count > 0:
                tma.store_wait(0)
                mbarrier.arrive(kv_free.index((key_count - 1) % _KEY_SLOTS), count=1)
            d_k = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
            d_v = gl.zeros([_SIDE, _WIDTH], gl.float32, SUM)
            for half in range(2):
                if (half == 0) == up:
                    d_k, d_v, count = _diagonal(
                        here, k, v, d_k, d_v, count, up, key_block, lasts, scale, WORKER, GROUP, BOUNDED
                    )  # fmt: skip
                else:
                    d_k, d_v, count = _rest(
                        here, k, v, d_k, d_v, count, end, up, key_block, lasts, scale, WORKER, GROUP, BOUNDED
                    )  # fmt: skip
            _write_gradients(here, out, d_k, d_v, pair, key_block, slot, seq, WORKER, KV_HEADS)
            key_count += 1
        heads += 1
        pair = _published_tile(heads, scheduler)
    tma.store_wait(0)


@gluon.jit
def _attention_backward_head(
    q, k, v, d_out, logs, d_q_out, d_k_out, d_v_out, sums, query_sums, found, head_counter, last, last_batch,
    pairs, key_blocks, seq, q_head, k_head, v_head, d_out_head, d_q_head, d_k_head, d_v_head, scale, plain_scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    k_here = gl.allocate_shared_memory(gl.bfloat16, [_KEY_SLOTS * _WORKERS, _SIDE, _WIDTH], k.layout)
    v_here = gl.allocate_shared_memory(gl.bfloat16, [_KEY_SLOTS * _WORKERS, _SIDE, _WIDTH], v.layout)
    q_here = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _SIDE, _WIDTH], q.layout)
    d_out_here = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _SIDE, _WIDTH], d_out.layout)
    ds_here = gl.allocate_shared_memory(gl.bfloat16, [_SLOTS * _WORKERS, _SIDE, _SIDE], q.layout)
    d_k_here = gl.allocate_shared_memory(gl.bfloat16, [_WORKERS, _SIDE, _WIDTH], k.layout)
    d_q_here = gl.allocate_shared_memory(gl.bfloat16, [_SIDE, _WIDTH], q.layout)
    logs_here = gl.allocate_shared_memory(gl.float32, [_STAGES, 1, 2 * _SIDE], logs.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [_KEY_SLOTS, 1], mbarrier.MBarrierLayout())
    kv_free = gl.allocate_shared_memory(gl.int64, [_KEY_SLOTS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    ds_free = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    # The workers and the adder read keys and the numbers of heads.
    for slot in gl.static_range(_KEY_SLOTS):
        mbarrier.init(kv_full.index(slot), count=1)
        mbarrier.init(kv_free.index(slot), count=_WORKERS + 1)
    scheduler = _make_scheduler(_WORKERS + 1)
    _init_steps(full, free, ds_full, ds_free, _STAGES, _SLOTS, 1)
    fence_async_shared()
    here = (k_here, v_here, q_here, d_out_here, logs_here, ds_here, kv_full, full, free, ds_full, ds_free)
    fetch = (q, k, v, d_out, logs, q_head, k_head, v_head, d_out_head)
    out = (d_k_out, d_v_out, d_k_here, d_k_head, d_v_head, found, plain_scale)
    bounds = (last, last_batch)
    adding = (sums, query_sums, d_q_out, d_q_here, d_q_head, found, plain_scale)
    gl.warp_specialize([
        (_worker, (here, kv_free, scheduler, out, bounds, pairs, key_blocks, seq, scale, 0, KV_HEADS, GROUP, BOUNDED)),
        (_worker, (here, kv_free, scheduler, out, bounds, pairs, key_blocks, seq, scale, 1, KV_HEADS, GROUP, BOUNDED)),
        (_adder, (here, kv_free, scheduler, adding, bounds, pairs, key_blocks, seq, KV_HEADS, GROUP, BOUNDED)),
        (_fetcher, (here, kv_free, scheduler, head_counter, fetch, bounds, pairs, key_blocks, seq, KV_HEADS, GROUP, BOUNDED)),
    ], [4, 4, 1], [208, 72, 24])  # fmt: skip


def attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, last: Tensor | None, beside: bool,
    measured: bool, summed: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `hopper_backward.attend_backward` does."""
    batch, seq, heads, width = q.shape
    kv_heads, side = k.shape[2], _SIDE.value
    group, pairs = heads // kv_heads, batch * kv_heads
    gradients = d_q, d_k, d_v = room_beside(q, k, v, beside)
    token_sums = TokenSums.of(q, 1, summed)
    logs = prepare(out, d_out, lse, LSE_FACTOR, token_sums.values)
    programs = min(processors(q.device), pairs)
    sums = torch.empty((programs, group, seq, width), dtype=torch.float32, device=q.device)
    # The number of heads that programs have taken, and the largest magnitudes.
    counts = torch.zeros(1 + _FOUND.value, dtype=torch.int32, device=q.device)
    found = counts[1:] if measured else None
    _attention_backward_head[(programs,)](
        described(q, side), described(k, side), described(v, side), described(d_out, side), tiled(logs, 1, 2 * side, LOGS),
        described(d_q, side), described(d_k, side), described(d_v, side), sums, token_sums.queries, found, counts, *bound(last),
        pairs, seq // (side * _WORKERS.value), seq, *(x.stride(2) for x in (q, k, v, d_out, d_q, d_k, d_v)),
        scale / math.log(2), scale, kv_heads, group, last is not None, num_warps=4,
    )  # fmt: skip
    return noted_together(gradients, found, token_sums)

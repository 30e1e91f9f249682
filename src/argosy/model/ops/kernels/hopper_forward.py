"""The forward pass of causal attention on Hopper.

A program is persistent: it has a multiprocessor to itself and takes tiles from an atomic counter (a dynamic tile scheduler) until none is
left, of each section of KV heads the longest first. So all programs end at about the same time, also where documents make tiles short, or
other work has some of the multiprocessors. One warp takes the tiles, publishes their numbers, and loads blocks of keys and values into a ring
buffer in shared memory, and the queries of each worker, with two slots also those of its next tile. Workers of four warps each compute: a
worker has 64 queries of one head, and the heads that share a KV head work on the same blocks. While one worker computes exponentials, the
matmuls of the others run.

A stage of the ring holds block c of the keys and block c of the values. The matmul with the values runs one block late, beside the
exponentials of block c. Block c of the keys and block c - 1 of the values are therefore freed, and loaded, together.

BOUNDED, each query has a first key it sees (a document's or a window's), and key blocks before it are not loaded.
"""

from __future__ import annotations

import math

import torch
import triton
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from argosy.model.ops.kernels.hopper_scheduler import _make_scheduler, _publish_tile, _published_tile
from argosy.model.ops.kernels.hopper_tiles import largest_divisor
from argosy.model.ops.matmul import processors

# Queries per worker, and keys per block.
_QUERIES, _KEYS = gl.constexpr(64), gl.constexpr(128)
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Workers per program, stages of its ring and slots for the queries of each worker, by head width: as many workers and stages as registers
# and shared memory allow.
_TEAMS = {64: (3, 4, 2), 128: (2, 2, 1)}
# Bytes of keys and values that programs which run at the same time share in the L2 cache.
_CACHED = 2**25
# Newer versions of Triton renamed these.
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _log2(x):
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


# The bits of a column's number that differ between the threads of a row of scores: the other bits are constants of a register. With other
# bits `_hide` is as right, but slower.
_LANE_BITS = gl.constexpr(6)
# Subtract 1e38 where the limit is lower, or higher, than the column.
_HIDE_AFTER = gl.constexpr("{ .reg .f32 far; set.lt.f32.f32 far, $2, $3; fma.rn.f32 $0, far, 0fFE967699, $1; }")
_HIDE_BEFORE = gl.constexpr("{ .reg .f32 far; set.gt.f32.f32 far, $2, $3; fma.rn.f32 $0, far, 0fFE967699, $1; }")


@gluon.jit
def _hide(scores, limits, HOW: gl.constexpr):
    """Return scores, lowered so far that their exponentials are zero where the column is beyond its row's limit.

    This compares floats with constants, two instructions a score. Of `gl.where` the compiler makes up to six. Scores must be finite: a NaN or
    an infinity is not hidden, so it reaches all rows of its block, and a row of which all visible scores are minus infinity sees hidden keys.
    """
    column = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    limit = (limits[:, None] - (column & _LANE_BITS)[None, :]).to(gl.float32)
    constant = (column & ~_LANE_BITS).to(gl.float32)[None, :]
    operands = [scores, limit, constant]
    return gl.inline_asm_elementwise(HOW, "=f,f,f,f", operands, dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _split(number, head_tiles, SECTION: gl.constexpr):
    """Return batch x KV heads + KV head, and which of its tiles (0 is the longest), for the number of a tile.

    Programs work on SECTION KV heads at a time, of which the longest tiles come first.
    """
    within = number % (SECTION * head_tiles)
    return number // (SECTION * head_tiles) * SECTION + within % SECTION, within // SECTION


@gluon.jit
def _part(tile, worker, blocks, GROUP: gl.constexpr, WORKERS: gl.constexpr):
    """Return a worker's block of queries and head of the group. A worker without queries gets those of the last one."""
    part = gl.minimum(tile * WORKERS + worker, blocks * GROUP - 1)
    return blocks - 1 - part // GROUP, part % GROUP


@gluon.jit
def _has_queries(tile, worker, blocks, GROUP: gl.constexpr, WORKERS: gl.constexpr):
    """Return whether a worker has queries of a tile. In a head's last tile some may have none."""
    return tile * WORKERS + worker < blocks * GROUP


@gluon.jit
def _key_blocks(block):
    """Return the number of key blocks up to the last that a block of queries sees."""
    return (block * _QUERIES + _QUERIES - 1) // _KEYS + 1


@gluon.jit
def _unseen_blocks(bounds, sample, block, BOUNDED: gl.constexpr):
    """Return the number of key blocks before the first that a block of queries sees."""
    unseen = 0
    if BOUNDED:
        first, first_batch = bounds
        unseen = gl.load(first + sample * first_batch + block * _QUERIES) // _KEYS
    return unseen


@gluon.jit
def _fetcher(
    ring, scheduler, tile_counter, fetch, bounds, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr,
    WIDTH: gl.constexpr, WORKERS: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    q_here, k_here, v_here, q_full, q_free, k_full, v_full, free = ring
    q, k, v, seq, q_head, k_head, v_head, tiles, head_tiles = fetch
    blocks = seq // _QUERIES
    # Key blocks loaded so far.
    count = 0
    late_stage = 0
    late_row = 0
    late_column = 0
    turn = 0
    number = gl.atomic_add(tile_counter, 1, sem="relaxed")
    while number < tiles:
        _publish_tile(number, turn, scheduler)
        pair, tile = _split(number, head_tiles, SECTION)
        start = pair // KV_HEADS * seq
        kv_head = pair % KV_HEADS
        longest, _ = _part(tile, 0, blocks, GROUP, WORKERS)
        shortest, _ = _part(tile, WORKERS - 1, blocks, GROUP, WORKERS)
        key_blocks = _key_blocks(longest)
        for back in range(key_blocks - _unseen_blocks(bounds, pair // KV_HEADS, shortest, BOUNDED)):
            row = start + (key_blocks - 1 - back) * _KEYS
            stage = count % STAGES
            mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(k_full.index(stage), _KEYS * WIDTH * 2)
            _fetch(k, [row, kv_head * k_head], k_full.index(stage), k_here.index(stage))
            if count > 0:
                mbarrier.expect(v_full.index(late_stage), _KEYS * WIDTH * 2)
                _fetch(v, [late_row, late_column], v_full.index(late_stage), v_here.index(late_stage))
            if back == 0:
                for worker in gl.static_range(WORKERS):
                    block, head = _part(tile, worker, blocks, GROUP, WORKERS)
                    slot = worker * Q_SLOTS + turn % Q_SLOTS
                    mbarrier.wait(q_free.index(slot), ((turn // Q_SLOTS) & 1) ^ 1)
                    mbarrier.expect(q_full.index(slot), _QUERIES * WIDTH * 2)
                    place = [start + block * _QUERIES, (kv_head * GROUP + head) * q_head]
                    _fetch(q, place, q_full.index(slot), q_here.index(slot))
            late_stage = stage
            late_row = row
            late_column = kv_head * v_head
            count += 1
        turn += 1
        # Only after the last load: a tile that is taken earlier waits for this program while others have none left.
        number = gl.atomic_add(tile_counter, 1, sem="relaxed")
    _publish_tile(number, turn, scheduler)
    if count > 0:
        mbarrier.wait(free.index(count % STAGES), ((count // STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(late_stage), _KEYS * WIDTH * 2)
        _fetch(v, [late_row, late_column], v_full.index(late_stage), v_here.index(late_stage))


@gluon.jit
def _thread_sums(p):
    """Return the partial row sums of each of a row's four threads, which are summed over the threads once at the end."""
    return gl.sum(gl.sum(p.reshape([_QUERIES, _KEYS // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def _skip(ring, count, blocks, STAGES: gl.constexpr):
    """Let key blocks pass that only other workers need; return the number of blocks seen so far."""
    _, _, _, _, _, k_full, v_full, free = ring
    for _ in range(blocks):
        mbarrier.wait(k_full.index(count % STAGES), (count // STAGES) & 1)
        mbarrier.arrive(free.index(count % STAGES), count=1)
        mbarrier.wait(v_full.index(count % STAGES), (count // STAGES) & 1)
        count += 1
    return count


@gluon.jit
def _write_result(
    work, o, total, highest, rows, pair, block, head, WORKER: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, OUT: gl.constexpr
):  # fmt: skip
    """Write the log-sum-exp of a block of queries, and begin to write its attention."""
    out, lse, out_here, seq, out_head, _, _, scale = work
    total = gl.convert_layout(total, highest.type.layout)
    gl.store(
        lse + (pair * GROUP + head).to(gl.int64) * seq + rows, (highest * scale + _log2(total)) * 0.6931471805599453
    )
    o = o * gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUT))[:, None]
    tma.store_wait(0)
    out_here.index(WORKER).store(o.to(gl.bfloat16))
    fence_async_shared()
    place = [pair // KV_HEADS * seq + block * _QUERIES, (pair % KV_HEADS * GROUP + head) * out_head]
    _write(out, place, out_here.index(WORKER))


@gluon.jit
def _attend(
    ring, work, bounds, queries, count, pair, block, head, longest, unseen, most_unseen,
    WORKER: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Compute the attention of a block of queries of a head, and begin to write it; return the number of key blocks seen so far."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SHARES: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    _, k_here, v_here, _, _, k_full, v_full, free = ring
    q_here, q_full, q_free, q_phase = queries
    scale = work[-1]
    key_blocks = _key_blocks(block)
    nothing = gl.zeros([_QUERIES, _KEYS], gl.float32, SCORES)
    count = _skip(ring, count, longest - key_blocks, STAGES)
    # The diagonal block, the only one with masked keys unless BOUNDED.
    stage = count % STAGES
    mbarrier.wait(q_full, q_phase)
    mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
    s = warpgroup_mma(q_here, k_here.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(free.index(stage), count=1)
    rows = block * _QUERIES + gl.arange(0, _QUERIES, gl.SliceLayout(1, SCORES))
    s = _hide(s, rows - (key_blocks - 1) * _KEYS, _HIDE_AFTER)
    if BOUNDED:
        firsts = gl.load(bounds[0] + pair // KV_HEADS * bounds[1] + rows)
        s = _hide(s, firsts - (key_blocks - 1) * _KEYS, _HIDE_BEFORE)
    highest = gl.max(s, axis=1)
    p = _exp2(s * scale - (highest * scale)[:, None])
    total = _thread_sums(p)
    shares = gl.convert_layout(p.to(gl.bfloat16), SHARES)
    o = gl.zeros([_QUERIES, WIDTH], gl.float32, OUT)
    for back in range(1, key_blocks - unseen):
        late_stage = count % STAGES
        late_phase = (count // STAGES) & 1
        count += 1
        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        mbarrier.wait(v_full.index(late_stage), late_phase)
        s = warpgroup_mma(q_here, k_here.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        o = warpgroup_mma(shares, v_here.index(late_stage), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        if BOUNDED:
            s = _hide(s, firsts - (key_blocks - 1 - back) * _KEYS, _HIDE_BEFORE)
        higher = gl.maximum(highest, gl.max(s, axis=1))
        shrink = _exp2((highest - higher) * scale)
        p = _exp2(s * scale - (higher * scale)[:, None])
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]
        total += _thread_sums(p)
        highest = higher
        # Waited for above. It is here to keep the assembler from moving the wait for o above the exponentials.
        mbarrier.wait(v_full.index(late_stage), late_phase)
        o, p = warpgroup_mma_wait(0, deps=[o, p])
        shares = gl.convert_layout(p.to(gl.bfloat16), SHARES)
        mbarrier.arrive(free.index(stage), count=1)
        o = o * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    mbarrier.arrive(q_free, count=1)
    mbarrier.wait(v_full.index(count % STAGES), (count // STAGES) & 1)
    o = warpgroup_mma(shares, v_here.index(count % STAGES), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    count = _skip(ring, count + 1, unseen - most_unseen, STAGES)
    _write_result(work, o, gl.sum(total, axis=1), highest, rows, pair, block, head, WORKER, KV_HEADS, GROUP, OUT)
    return count


@gluon.jit
def _worker(
    ring, scheduler, work, bounds, WORKER: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr,
    WIDTH: gl.constexpr, WORKERS: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    q_here, q_full, q_free = ring[0], ring[3], ring[4]
    seq, tiles, head_tiles = work[3], work[5], work[6]
    blocks = seq // _QUERIES
    # Key blocks seen so far.
    count = 0
    turn = 0
    number = _published_tile(turn, scheduler)
    while number < tiles:
        pair, tile = _split(number, head_tiles, SECTION)
        first, _ = _part(tile, 0, blocks, GROUP, WORKERS)
        block, head = _part(tile, WORKER, blocks, GROUP, WORKERS)
        shortest, _ = _part(tile, WORKERS - 1, blocks, GROUP, WORKERS)
        longest = _key_blocks(first)
        most_unseen = _unseen_blocks(bounds, pair // KV_HEADS, shortest, BOUNDED)
        slot = WORKER * Q_SLOTS + turn % Q_SLOTS
        queries = (q_here.index(slot), q_full.index(slot), q_free.index(slot), (turn // Q_SLOTS) & 1)
        if _has_queries(tile, WORKER, blocks, GROUP, WORKERS):
            unseen = _unseen_blocks(bounds, pair // KV_HEADS, block, BOUNDED)
            count = _attend(
                ring, work, bounds, queries, count, pair, block, head, longest, unseen, most_unseen,
                WORKER, KV_HEADS, GROUP, WIDTH, STAGES, BOUNDED,
            )  # fmt: skip
        else:
            mbarrier.wait(queries[1], queries[3])
            mbarrier.arrive(queries[2], count=1)
            count = _skip(ring, count, longest - most_unseen, STAGES)
        turn += 1
        number = _published_tile(turn, scheduler)
    tma.store_wait(0)


@gluon.jit
def _attention_forward(
    q, k, v, out, lse, tile_counter, first, first_batch, seq, q_head, k_head, v_head, out_head, tiles, head_tiles, scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SECTION: gl.constexpr, WIDTH: gl.constexpr, WORKERS: gl.constexpr,
    STAGES: gl.constexpr, Q_SLOTS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    q_here = gl.allocate_shared_memory(gl.bfloat16, [WORKERS * Q_SLOTS, _QUERIES, WIDTH], q.layout)
    out_here = gl.allocate_shared_memory(gl.bfloat16, [WORKERS, _QUERIES, WIDTH], out.layout)
    k_here = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _KEYS, WIDTH], k.layout)
    v_here = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _KEYS, WIDTH], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [WORKERS * Q_SLOTS, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [WORKERS * Q_SLOTS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scheduler = _make_scheduler(WORKERS)
    for slot in gl.static_range(WORKERS * Q_SLOTS):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(q_free.index(slot), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=WORKERS)
    fence_async_shared()
    ring = (q_here, k_here, v_here, q_full, q_free, k_full, v_full, free)
    work = (out, lse, out_here, seq, out_head, tiles, head_tiles, scale)
    fetch = (q, k, v, seq, q_head, k_head, v_head, tiles, head_tiles)
    bounds = (first, first_batch)
    if WORKERS == 3:
        gl.warp_specialize([
            (_worker, (ring, scheduler, work, bounds, 0, KV_HEADS, GROUP, SECTION, WIDTH, WORKERS, STAGES, Q_SLOTS, BOUNDED)),
            (_worker, (ring, scheduler, work, bounds, 1, KV_HEADS, GROUP, SECTION, WIDTH, WORKERS, STAGES, Q_SLOTS, BOUNDED)),
            (_worker, (ring, scheduler, work, bounds, 2, KV_HEADS, GROUP, SECTION, WIDTH, WORKERS, STAGES, Q_SLOTS, BOUNDED)),
            (_fetcher, (ring, scheduler, tile_counter, fetch, bounds, KV_HEADS, GROUP, SECTION, WIDTH, WORKERS, STAGES, Q_SLOTS, BOUNDED)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_worker, (ring, scheduler, work, bounds, 0, KV_HEADS, GROUP, SECTION, WIDTH, WORKERS, STAGES, Q_SLOTS, BOUNDED)),
            (_worker, (ring, scheduler, work, bounds, 1, KV_HEADS, GROUP, SECTION, WIDTH, WORKERS, STAGES, Q_SLOTS, BOUNDED)),
            (_fetcher, (ring, scheduler, tile_counter, fetch, bounds, KV_HEADS, GROUP, SECTION, WIDTH, WORKERS, STAGES, Q_SLOTS, BOUNDED)),
        ], [4, 1], [240, 24])  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the attention of q, k and v [batch, seq, heads, head_dim], and its log-sum-exp [batch, heads, seq].

    Args:
        first: the first key each query sees, [1 or batch, seq]; None if all see the first of all.
    """
    batch, seq, heads, width = q.shape
    kv_heads = k.shape[2]
    workers, stages, q_slots = _TEAMS[width]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, seq), dtype=torch.float32, device=q.device)
    # The number of tiles that programs have taken.
    tile_counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    head_tiles = triton.cdiv(seq // _QUERIES.value * (heads // kv_heads), workers)
    tiles = head_tiles * batch * kv_heads
    _attention_forward[(min(processors(q.device), tiles),)](
        described(q, _QUERIES.value), described(k, _KEYS.value), described(v, _KEYS.value),
        described(out, _QUERIES.value), lse, tile_counter, *bound(first), seq, q.stride(2), k.stride(2), v.stride(2), out.stride(2),
        tiles, head_tiles, scale / math.log(2), kv_heads, heads // kv_heads, heads_at_once(kv_heads, seq, width), width, workers,
        stages, q_slots, first is not None, num_warps=4,
    )  # fmt: skip
    return out, lse


def heads_at_once(kv_heads: int, seq: int, width: int) -> int:
    """Return how many KV heads programs work on at a time, so that keys and values are read from memory once: a divisor of `kv_heads`."""
    bytes_each = 2 * seq * width * torch.bfloat16.itemsize
    return largest_divisor(kv_heads, _CACHED // bytes_each)


def bound(places: Tensor | None) -> tuple[Tensor | None, int]:
    """Return places [1 or batch, seq] and how far apart the samples' are."""
    return places, 0 if places is None or len(places) == 1 else places.stride(0)


def described(x: Tensor, rows: int) -> TensorDescriptor:
    """Return a TMA descriptor of x [batch, seq, heads, head_dim] with blocks of `rows` tokens.

    It has one row per token. Head h starts at column h x its stride.
    """
    batch, seq, heads, width = x.shape
    shape = [batch * seq, (heads - 1) * x.stride(2) + width]
    return TensorDescriptor(x, shape, [x.stride(1), 1], [rows, width], _LAYOUT)

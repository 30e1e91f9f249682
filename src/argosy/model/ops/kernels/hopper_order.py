"""The order in which programs of the attention backward kernels add to a sum of dQ.

Programs with different keys add to the same sums of dQ. In deterministic mode they do so in a fixed order. A counter per warp and block of queries says how many programs have
added. It is read before the matmul and written one step late beside the next matmul, so that neither latency is exposed.

FIRST_KEYS: programs with the first keys start first. A program therefore waits only for programs started before it and cannot deadlock.
They are also the longest, so none is left over at the end. All iterate over the queries from the last down to their diagonal. A program
waits at its start until the one before it is a step ahead, and from then on they stay in step.

FOLDED: a program has two key blocks, the one with index n - 1 - i and then the one with index i, so that all programs are equally long
and start together. It iterates over the queries upwards in its first part and downwards in its second. In each round, which is
one block of 128 queries, at most two programs then add to the same sums, and they begin with different halves of them.

BOUNDED, each key has a last query that sees it (a document's or a window's), and a program ends with the last query of its last key.
As later keys are never seen by fewer of the later queries, all programs between a program's keys and a block of queries add to its sum
if that program does. In the order LAST_KEYS their number is therefore the same as without bounds.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Workers of a program; keys of each, and queries of a step.
_WORKERS, _SIDE = gl.constexpr(2), gl.constexpr(64)
# Braces make registers and labels local. Relaxed reads suffice: additions happen in L2 and cannot start before the read is done.
_READ_TURN = gl.constexpr("ld.relaxed.gpu.global.u32 $0, [$1];")
_AWAIT_TURN = gl.constexpr(
    "{ .reg .pred late; mov.u32 $0, $1; again: setp.ne.u32 late, $0, $3; @!late bra ready;"
    " ld.relaxed.gpu.global.u32 $0, [$2]; bra again; ready: }"
)
# The barrier orders the additions of all lanes before the release by one of them.
_END_TURN = gl.constexpr(
    "{ .reg .pred ends; bar.warp.sync 0xffffffff; setp.ne.u32 ends, $2, 0;"
    " @ends red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0; }"
)
# The approximate number of programs that run at the same time.
_FULL_WAVE = 128
# The order in which programs add to a sum of dQ: any, the last keys first, the first keys first, or folded.
ANY, LAST_KEYS, FIRST_KEYS, FOLDED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
# From this many key blocks on, starting the longest programs first gains more than waiting for the previous program costs.
_LONG = 32
# The fewest query heads of a KV head for which a release is seen before the next program waits for it, FOLDED.
_STEPS_APART = 4


@gluon.jit
def _place(key_blocks, part, SECTION: gl.constexpr, ORDER: gl.constexpr):
    """Return batch x KV heads + KV head, the key block of a part of the program, and the steps of the parts before it, by group.

    Of each SECTION KV heads, programs that add first start first. FOLDED, all programs of a KV head start together.
    """
    place = gl.program_id(0)
    before = 0
    if ORDER == FOLDED:
        half = key_blocks // 2
        pair = place // half
        key_block = place % half
        before = part * (key_block + 1) * _WORKERS
        key_block += (1 - part) * (key_blocks - 1 - 2 * key_block)
    else:
        within = place % (SECTION * key_blocks)
        key_block = within // SECTION
        if ORDER == LAST_KEYS:
            key_block = key_blocks - 1 - key_block
        pair = place // (SECTION * key_blocks) * SECTION + within % SECTION
    return pair, key_block, before


@gluon.jit
def _steps(bounds, sample, key_block, key_blocks, GROUP: gl.constexpr, BOUNDED: gl.constexpr):
    """Return how many steps a part of a program has: blocks of queries that see its keys, of each head of the group."""
    end = key_blocks * _WORKERS
    if BOUNDED:
        last, last_batch = bounds
        end = gl.load(last + sample * last_batch + (key_block * _WORKERS + _WORKERS) * _SIDE - 1) // _SIDE + 1
    return (end - key_block * _WORKERS) * GROUP


@gluon.jit
def _step(step, key_block, part, blocks, GROUP: gl.constexpr, ORDER: gl.constexpr):
    """Return the block of queries and the head of the group at a step of a part: from the diagonal on, or from the last block back
    to it.

    With ORDER ANY, programs start with different heads, so that few add to the same sums at a time.
    """
    block = key_block * _WORKERS + step // GROUP
    member = step % GROUP
    if ORDER == ANY:
        member = (step + key_block) % GROUP
    if ORDER == FIRST_KEYS:
        block = blocks - 1 - step // GROUP
    if ORDER == FOLDED:
        block += part * (blocks - 1 - step // GROUP - block)
    return block, member


@gluon.jit
def _adding_before(block, key_block, part, key_blocks, ORDER: gl.constexpr):
    """Return how many programs add to a block of queries before the one with this key block."""
    row = block // _WORKERS
    before = row - key_block
    if ORDER == FIRST_KEYS:
        before = key_block
    if ORDER == FOLDED:
        # At round r a row is read by the first part whose key block is r before it, and by the second part whose key block is r -
        # (key_blocks - row). Of a row's two blocks, the first part begins with the even one, the second with the odd one.
        odd = block % _WORKERS
        second = before + odd - (key_blocks - row)
        second = gl.minimum(gl.maximum(second, 0), gl.minimum(key_blocks // 2, row + 1))
        first = key_block + key_blocks - row + 1 - odd
        first = gl.minimum(first, gl.maximum(row - key_blocks // 2 + 1, 0))
        before += second + part * (key_block + first - before - second)
    return before


def order_of(key_blocks: int, group: int, processors: int, *, bounded: bool) -> gl.constexpr:
    """Return the order in which programs add to a sum of dQ in deterministic mode.

    FOLDED wants all programs of a KV head at the same time, beside other kernels on half of the multiprocessors, and enough steps
    between two programs' additions to the same sums.
    """
    if bounded:
        return LAST_KEYS
    if group >= _STEPS_APART and key_blocks % 2 == 0 and key_blocks <= processors:
        return FOLDED
    return FIRST_KEYS if key_blocks >= _LONG else LAST_KEYS


def section(pairs: int, key_blocks: int) -> int:
    """Return how many KV heads to work on at a time, so that their data stays cached: a divisor of `pairs` that fills the GPU."""
    wanted = max(1, _FULL_WAVE // key_blocks)
    return max(size for size in range(1, wanted + 1) if pairs % size == 0)

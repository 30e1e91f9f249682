"""What the programs of the attention backward kernels work on.

A program has 128 keys of one KV head, and goes through the blocks of 64 queries that see them, of all heads that share the keys. BOUNDED,
each key has a last query that sees it (a document's or a window's), and a program ends with the last query of its last key.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Workers of a program; keys of each, and queries of a step.
_WORKERS, _SIDE = gl.constexpr(2), gl.constexpr(64)
# The approximate number of programs that run at the same time.
_FULL_WAVE = 128


@gluon.jit
def _place(key_blocks, SECTION: gl.constexpr):
    """Return batch x KV heads + KV head, and the key block of the program.

    Of each SECTION KV heads, programs with the first keys start first: they are the longest.
    """
    place = gl.program_id(0)
    within = place % (SECTION * key_blocks)
    return place // (SECTION * key_blocks) * SECTION + within % SECTION, within // SECTION


@gluon.jit
def _steps(bounds, sample, key_block, key_blocks, GROUP: gl.constexpr, BOUNDED: gl.constexpr):
    """Return how many steps a program has: blocks of queries that see its keys, of each head of the group."""
    end = key_blocks * _WORKERS
    if BOUNDED:
        last, last_batch = bounds
        end = gl.load(last + sample * last_batch + (key_block * _WORKERS + _WORKERS) * _SIDE - 1) // _SIDE + 1
    return (end - key_block * _WORKERS) * GROUP


@gluon.jit
def _step(step, key_block, GROUP: gl.constexpr):
    """Return the block of queries and the head of the group at a step, from the diagonal on.

    Programs start with different heads, so that few add to the same sums at a time.
    """
    return key_block * _WORKERS + step // GROUP, (step + key_block) % GROUP


def section(pairs: int, key_blocks: int) -> int:
    """Return how many KV heads to work on at a time, so that their data stays cached: a divisor of `pairs` that fills the GPU."""
    wanted = max(1, _FULL_WAVE // key_blocks)
    return max(size for size in range(1, wanted + 1) if pairs % size == 0)

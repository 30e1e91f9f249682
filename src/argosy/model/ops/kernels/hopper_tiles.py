"""What the programs of the attention backward kernels work on.

A block of keys is 128 keys of one KV head. A program has one such block, or in `hopper_backward_head` all of a head in turn, and goes through
the blocks of 64 queries that see it, of all heads that share the keys. BOUNDED, each key has a last query that sees it (a document's or a
window's), and no program goes past the last query of a block's last key.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Workers of a program; keys of each, and queries of a step.
_WORKERS, _SIDE = gl.constexpr(2), gl.constexpr(64)
# Places for the largest magnitudes of gradients, which programs share.
_FOUND = gl.constexpr(64)
# The approximate number of programs that run at the same time.
_FULL_WAVE = 128
# Triton 3.9, which renamed `_reinterpret`, copies a matmul's operand that is in registers before each matmul, and computes an address in
# shared memory by instructions that LLVM moves out of loops. Both take registers that these kernels do not have.
TRITON_3_9 = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _place(key_blocks, SECTION: gl.constexpr):
    """Return batch x KV heads + KV head, and the key block of the program.

    Of each SECTION KV heads, programs with the first keys start first: they are the longest.
    """
    place = gl.program_id(0)
    within = place % (SECTION * key_blocks)
    return place // (SECTION * key_blocks) * SECTION + within % SECTION, within // SECTION


@gluon.jit
def _end(bounds, sample, key_block, key_blocks, BOUNDED: gl.constexpr):
    """Return the number of the block of queries after the last that sees a block of keys."""
    end = key_blocks * _WORKERS
    if BOUNDED:
        last, last_batch = bounds
        end = gl.load(last + sample * last_batch + (key_block * _WORKERS + _WORKERS) * _SIDE - 1) // _SIDE + 1
    return end


@gluon.jit
def _steps(bounds, sample, key_block, key_blocks, GROUP: gl.constexpr, BOUNDED: gl.constexpr):
    """Return how many steps a program has: blocks of queries that see its keys, of each head of the group."""
    return (_end(bounds, sample, key_block, key_blocks, BOUNDED) - key_block * _WORKERS) * GROUP


@gluon.jit
def _step(step, key_block, GROUP: gl.constexpr):
    """Return the block of queries and the head of the group at a step, counted from the diagonal on.

    Programs that are at the same block have different heads of it, so that few add to the same sums at a time.
    """
    return key_block * _WORKERS + step // GROUP, (step + key_block) % GROUP


@gluon.jit
def _recomputed(place):
    """Return a place in shared memory whose address Triton 3.9 computes where it is used, not before the loop."""
    if TRITON_3_9:
        place = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [place], dtype=gl.int32, is_pure=False, pack=1)
    return place


@gluon.jit
def _magnitudes(x):
    """Return magnitudes, of which a NaN's is infinite: a maximum would ignore it."""
    size = gl.abs(x.to(gl.float32))
    return gl.where(size == size, size, float("inf"))


@gluon.jit
def _raise_found(found, place, magnitudes):
    """Raise one of the maxima of all gradients. Non-negative floats compare as integers do."""
    most = gl.max(gl.max(magnitudes, 1), 0)
    gl.atomic_max(found + place % _FOUND, most.to(gl.int32, bitcast=True), sem="relaxed")


@gluon.jit
def _store_gradients(
    out, d_k, d_v, pair, key_block, seq, WORKER: gl.constexpr, KV_HEADS: gl.constexpr, WIDTH: gl.constexpr, SUM: gl.constexpr
):  # fmt: skip
    """Write the gradients of a worker's keys and values, and raise one of the maxima of all gradients, if these are wanted.

    `out` has where to write them, the maxima or None, the strides of tokens and heads, and the scale of dK."""
    d_k_out, d_v_out, found, token_stride, head_stride, scale = out
    row = gl.arange(0, _SIDE, gl.SliceLayout(1, SUM))[:, None]
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, SUM))[None, :]
    token = pair // KV_HEADS * seq + (key_block * _WORKERS + WORKER) * _SIDE
    first = token.to(gl.int64) * token_stride + pair % KV_HEADS * head_stride
    d_k = (d_k * scale).to(gl.bfloat16)
    d_v = d_v.to(gl.bfloat16)
    gl.store(d_k_out + first + (row * token_stride + column), d_k)
    gl.store(d_v_out + first + (row * token_stride + column), d_v)
    if found is not None:
        of_k = _magnitudes(d_k)
        of_v = _magnitudes(d_v)
        _raise_found(found, key_block + pair, gl.maximum(of_k, of_v))


def section(pairs: int, key_blocks: int) -> int:
    """Return how many KV heads to work on at a time, so that their data stays cached: a divisor of `pairs` that fills the GPU."""
    return largest_divisor(pairs, _FULL_WAVE // key_blocks)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is not larger than `most`, but at least 1."""
    return max(size for size in range(1, max(1, min(number, most)) + 1) if number % size == 0)

"""Matmuls on Hopper, with what follows a product computed beside the next tile's matmul.

`hopper_finish` has what follows: the activation of a gated MLP, or its gradients, the sum with the residual stream, heads that rope turns, or
nothing but the writing.

A program is persistent and has a multiprocessor to itself. One warp loads tiles of both factors into a ring buffer in shared memory. Two
workers of four warps each have 64 tokens and 256 columns of the product. A worker puts a complete product into shared memory in 16 bits. It
reads it again block by block, each block while a step of the next product's matmul runs, computes what follows, and writes what
the other passes read. So the tensor cores do not wait for it, and no other kernel of this pass reads the product.

A tile before the activation has 128 columns of the gate and the same 128 of up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
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

from argosy.model.ops.kernels.hopper_finish import (
    _BLOCK,
    _COLUMNS,
    _TOKENS,
    _WORKERS,
    _finish,
    _saved_block,
)
from argosy.model.ops.kernels.hopper_forward import _LAYOUT, _fetch
from argosy.model.ops.matmul import processors

# How much of the factors' common dimension a step multiplies, and stages of the ring.
_DEPTH, _STAGES = gl.constexpr(64), gl.constexpr(3)
# Tiles below each other that are worked on at the same time: a square of as many tiles as there are multiprocessors loads least.
_BAND = gl.constexpr(16)


@gluon.jit
def _place(tile, row_tiles, column_tiles):
    """Return a tile's row and column of tiles."""
    band = tile // (_BAND * column_tiles)
    within = tile % (_BAND * column_tiles)
    height = gl.minimum(row_tiles - band * _BAND, _BAND)
    return band * _BAND + within % height, within // height


@gluon.jit
def _next(stage, phase):
    """Return the stage after this one, and the parity of its turn."""
    last = stage == _STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _loader(a, b, b_up, ring, sizes, THEN: gl.constexpr):
    a_here, b_here, full, free = ring
    row_tiles, column_tiles, steps = sizes
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, column_tiles)
        for step in range(steps):
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), (_WORKERS * _TOKENS + _COLUMNS) * _DEPTH * 2)
            for worker in gl.static_range(_WORKERS):
                place = [(row * _WORKERS + worker) * _TOKENS, step * _DEPTH]
                _fetch(a, place, full.index(stage), a_here.index(stage * _WORKERS + worker))
            if THEN == "activation":
                HALF: gl.constexpr = _COLUMNS // 2
                place = [column * HALF, step * _DEPTH]
                _fetch(b, place, full.index(stage), b_here.index(stage).slice(0, HALF))
                _fetch(b_up, place, full.index(stage), b_here.index(stage).slice(HALF, HALF))
            elif THEN == "gradients":
                _fetch(b, [step * _DEPTH, column * _COLUMNS], full.index(stage), b_here.index(stage))
            else:
                _fetch(b, [column * _COLUMNS, step * _DEPTH], full.index(stage), b_here.index(stage))
            stage, phase = _next(stage, phase)


@gluon.jit
def _halves(x, HALF: gl.constexpr):
    """Return the left and the right half of a worker's columns."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = x.reshape([_TOKENS, 2, HALF]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, LAYOUT), gl.convert_layout(right, LAYOUT)


@gluon.jit
def _put(x, here, first, WIDTH: gl.constexpr):
    """Put a product into shared memory, as blocks of columns."""
    if WIDTH == _BLOCK:
        here.index(first).store(x)
    else:
        left, right = _halves(x, WIDTH // 2)
        _put(left, here, first, WIDTH // 2)
        _put(right, here, first + WIDTH // 2 // _BLOCK, WIDTH // 2)


@gluon.jit
def _multiply(total, stage, phase, ring, WORKER: gl.constexpr, THEN: gl.constexpr):
    """Begin a step of the matmul, and wait for the step before."""
    a_here, b_here, full, _ = ring
    mbarrier.wait(full.index(stage), phase)
    b = b_here.index(stage) if THEN == "gradients" else b_here.index(stage).permute((1, 0))
    total = warpgroup_mma(a_here.index(stage * _WORKERS + WORKER), b, total, is_async=True)
    return warpgroup_mma_wait(1, deps=[total])


@gluon.jit
def _worker(
    ring, here, saved, outs, sizes, form, WORKER: gl.constexpr, KIND: gl.constexpr, THEN: gl.constexpr
):  # fmt: skip
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 16])
    BLOCKS: gl.constexpr = (_COLUMNS // 2 if THEN == "activation" else _COLUMNS) // _BLOCK
    free = ring[3]
    row_tiles, column_tiles, steps = sizes
    # Steps for each block of the product before.
    pace = steps // BLOCKS
    stage = 0
    phase = 0
    late_stage = 0
    # The tile of the product before. There is none at first: nothing past the last row is read or written.
    late_row = row_tiles
    late_column = 0
    inputs = _saved_block(0, late_row, late_column, (0, 0), saved, form, WORKER, KIND, THEN)
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _place(tile, row_tiles, column_tiles)
        total = gl.zeros([_TOKENS, _COLUMNS], gl.float32, PRODUCT)
        for block in range(BLOCKS):
            total = _multiply(total, stage, phase, ring, WORKER, THEN)
            if block > 0:
                mbarrier.arrive(free.index(late_stage), count=1)
            _finish(block, late_row, late_column, here, inputs, saved, outs, form, WORKER, KIND, THEN)
            next_row = gl.where(block + 1 < BLOCKS, late_row, row_tiles)
            inputs = _saved_block(block + 1, next_row, late_column, inputs, saved, form, WORKER, KIND, THEN)
            late_stage = stage
            stage, phase = _next(stage, phase)
            for _ in range(1, pace):
                total = _multiply(total, stage, phase, ring, WORKER, THEN)
                mbarrier.arrive(free.index(late_stage), count=1)
                late_stage = stage
                stage, phase = _next(stage, phase)
        for _ in range(pace * BLOCKS, steps):
            total = _multiply(total, stage, phase, ring, WORKER, THEN)
            mbarrier.arrive(free.index(late_stage), count=1)
            late_stage = stage
            stage, phase = _next(stage, phase)
        inputs = _saved_block(0, row, column, (0, 0), saved, form, WORKER, KIND, THEN)
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(free.index(late_stage), count=1)
        _put(total.to(gl.bfloat16), here, WORKER * (_COLUMNS // _BLOCK), _COLUMNS)
        late_row = row
        late_column = column
    for block in range(BLOCKS):
        _finish(block, late_row, late_column, here, inputs, saved, outs, form, WORKER, KIND, THEN)
        next_row = gl.where(block + 1 < BLOCKS, late_row, row_tiles)
        inputs = _saved_block(block + 1, next_row, late_column, inputs, saved, form, WORKER, KIND, THEN)


@gluon.jit
def _gemm_beside(
    a, b, b_up, saved, saved_beside, out, out_beside, out_last, row_tiles, column_tiles, steps, height, width, rope_rows,
    KIND: gl.constexpr, THEN: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=_BLOCK * 2, element_bitwidth=16, rank=2)
    B_SHAPE: gl.constexpr = [_STAGES, _DEPTH, _COLUMNS] if THEN == "gradients" else [_STAGES, _COLUMNS, _DEPTH]
    a_here = gl.allocate_shared_memory(gl.bfloat16, [_STAGES * _WORKERS, _TOKENS, _DEPTH], a.layout)
    b_here = gl.allocate_shared_memory(gl.bfloat16, B_SHAPE, b.layout)
    here = gl.allocate_shared_memory(gl.bfloat16, [_WORKERS * (_COLUMNS // _BLOCK), _TOKENS, _BLOCK], BLOCKS)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=_WORKERS)
    fence_async_shared()
    ring = (a_here, b_here, full, free)
    sizes = (row_tiles, column_tiles, steps)
    saved = (saved, saved_beside)
    outs = (out, out_beside, out_last)
    form = (height, width, rope_rows)
    gl.warp_specialize([
        (_worker, (ring, here, saved, outs, sizes, form, 0, KIND, THEN)),
        (_worker, (ring, here, saved, outs, sizes, form, 1, KIND, THEN)),
        (_loader, (a, b, b_up, ring, sizes, THEN)),
    ], [4, 1], [240, 24])  # fmt: skip


def gated_products(x: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return x gate^T, x up^T and activation(x gate^T) (x up^T), for x [tokens, in] and weights [width, in]."""
    out, out_up, value = (torch.empty((len(x), len(up)), dtype=x.dtype, device=x.device) for _ in range(3))
    span = _COLUMNS.value // 2
    factors = [_described(weight, span, _DEPTH.value) for weight in (gate, up)]
    _launch(x, span, factors, (None, None), (out, out_up, value), kind, "activation")
    return out, out_up, value


def gated_gradients(d_y: Tensor, down: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up [tokens, width], the first two results of `gated_products`, for the gradient d_y [tokens, out]
    of the third times down^T, where down is [out, width]."""
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    factor = _described(down, _DEPTH.value, _COLUMNS.value)
    _launch(d_y, _COLUMNS.value, (factor, None), (gate, up), (d_gate, d_up, None), kind, "gradients")
    return d_gate, d_up


def add_product(stream: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return stream + x weight^T + bias, for stream [tokens, out], x [tokens, in] and weight [out, in]. The product is rounded first."""
    out = torch.empty_like(stream)
    factor = _described(weight, _COLUMNS.value, _DEPTH.value)
    _launch(x, _COLUMNS.value, (factor, None), (stream, bias), (out, None, None), None, "sum")
    return out


def plain_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T, for x [tokens, in] and weight [out, in]."""
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    factor = _described(weight, _COLUMNS.value, _DEPTH.value)
    _launch(x, _COLUMNS.value, (factor, None), (None, None), (out, None, None), None, "product")
    return out


def product_heads(
    x: Tensor, weight: Tensor, rope: tuple[Tensor, Tensor], group: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [tokens, heads x head_dim] and keys [tokens, kv_heads x head_dim], both turned, and values, for x [tokens, in].

    The rows of the weight are slots of one head each: for every KV head its `group` query heads, its key, its value.

    Args:
        rope: cos and sin [rows, head_dim / 2]. Tokens use the rows in turn."""
    kv_heads = len(weight) // ((group + 2) * head_dim)
    widths = (kv_heads * group * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    q, k, v = (torch.empty((len(x), width), dtype=x.dtype, device=x.device) for width in widths)
    factor, kind = _described(weight, _COLUMNS.value, _DEPTH.value), (group, head_dim)
    _launch(
        x, _COLUMNS.value, (factor, None), rope, (q, k, v), kind, "heads", width=len(weight), rope_rows=len(rope[0])
    )
    return q, k, v


def _launch(
    a: Tensor, span: int, factors: Sequence[TensorDescriptor | None], saved: Sequence[Tensor | None],
    outs: tuple[Tensor, Tensor | None, Tensor | None], kind: str | tuple[int, int] | None, then: str, *, width: int | None = None,
    rope_rows: int = 0,
) -> None:  # fmt: skip
    """Multiply a and the factors, `span` columns of each at a time.

    Args:
        saved: what the kernel reads beside: gate and up, the stream and a bias, or cos and sin.
        kind: the activation, or the size of a group of query heads and of a head.
        width: the columns of the product, if they are not those of the first result.
        rope_rows: the rows of cos and sin."""
    tokens = len(a)
    width = outs[0].shape[1] if width is None else width
    steps = triton.cdiv(a.shape[1], _DEPTH.value)
    if steps < span // _BLOCK.value:
        raise ValueError(f"{steps} steps cannot have {span // _BLOCK.value} blocks of columns beside them")
    row_tiles, column_tiles = triton.cdiv(tokens, _WORKERS.value * _TOKENS.value), triton.cdiv(width, span)
    _gemm_beside[(min(processors(a.device), row_tiles * column_tiles),)](
        _described(a, _TOKENS.value, _DEPTH.value), *factors, *saved, *outs, row_tiles, column_tiles, steps, tokens,
        width, rope_rows, kind, then, num_warps=4,
    )  # fmt: skip


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], _LAYOUT)

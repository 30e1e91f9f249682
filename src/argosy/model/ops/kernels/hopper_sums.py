"""The sums of dQ to which the attention backward kernels add: prepared before such a kernel, written as dQ after it.

Programs with different keys add to the same sums, in any order. The sums are integers: adding those gives the same bits in every order,
which adding floats does not. A query's unit, the value of 1, is 2^-30 of a bound of its gradient, so that no sum overflows:

    |dQ| = |sum of P (dP - delta) K| <= 2 max |dP| max |K| <= 2 |dO| max |V| max |K|, since the sum of P is 1 and dP = dO V^T

with the norm of the query's dO, the largest norm of the head's V and the largest magnitude in its K. Rounding to units changes dQ less than
rounding dO and dS to 16 bits does: by some 1e-5 of a row's norm, or 1e-2 at worst where one channel of K and one row of V are 30
times the others.

For heads of 64, registers are added to the sums; for heads of 128, whole tiles of shared memory are (`_add_tile`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from argosy.model.ops.kernels.hopper_forward import bound, described
from argosy.model.ops.kernels.hopper_tiles import _FOUND, _SIDE, _WORKERS, section
from argosy.model.ops.kernels.row_sums_kernel import sum_rows
from argosy.model.ops.largest import note
from argosy.model.ops.token_sums import note_sums

LOGS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
# Columns of a tile that is added.
_COLUMNS = gl.constexpr(64)
# The bound of a gradient in units, half of the largest integer; the norm and the bound that smaller ones count as; and 2, with room for
# what rounding adds to the bound.
_UNITS, _LEAST, _TWICE = gl.constexpr(2.0**30), gl.constexpr(1e-18), gl.constexpr(2.05)
# A thread has four values, and adds each of them to 128 contiguous bytes together with the other threads of its warp.
_ADD = gl.constexpr(
    "cvt.rni.s32.f32 $0, $4; cvt.rni.s32.f32 $1, $5; cvt.rni.s32.f32 $2, $6; cvt.rni.s32.f32 $3, $7;"
    " red.global.add.s32 [$8], $0; red.global.add.s32 [$8+128], $1;"
    " red.global.add.s32 [$8+256], $2; red.global.add.s32 [$8+384], $3;"
)
_ADD_OPERANDS = gl.constexpr("=&r,=&r,=&r,=&r,f,f,f,f,l,l,l,l")


@gluon.jit
def _add(values, places):
    """Add values, in units, to the sums. Of four values next to each other in a thread the first's place counts."""
    gl.inline_asm_elementwise(_ADD, _ADD_OPERANDS, [values, places], dtype=gl.int32, is_pure=False, pack=4)


@builtin
def _add_tile(sums, place, tile, _semantic=None):
    """Start to add a tile in shared memory to the sums, by their TMA descriptor. Triton has a function for it from 3.9 on."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, sums.handle, place, tile.handle)


@gluon.jit
def _rounded(x):
    return gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _units(largest, pair):
    """Return 1 in units, for a query of a KV head whose dO has the norm 1."""
    return _UNITS / gl.maximum(_TWICE * gl.load(largest + 2 * pair) * gl.load(largest + 2 * pair + 1), _LEAST)


@triton.jit
def _raise(largest, value):
    """Raise a maximum of non-negative floats, which compare as integers do. A NaN counts as infinite: a maximum would ignore it."""
    tl.atomic_max(
        largest, tl.max(tl.where(value == value, value, float("inf"))).to(tl.int32, bitcast=True), sem="relaxed"
    )


@triton.jit
def _attention_before(
    out, d_out, k, v, lse, logs, inverse, largest, sums, value_sums, lse_factor, seq, heads, out_batch, out_token, out_head, d_out_batch,
    d_out_token, d_out_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Prepare R queries of a head: write lse times a factor and minus delta (the sum of out x d_out), and the sum of d_out, if it is wanted.

    If dQ is added to sums, also write 1 / the norm of d_out and zero the sums. For R keys of a KV head, the program of its first query head
    raises the largest magnitude in K and the largest norm of V.
    """
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % (seq // R)
    batch = (tl.program_id(0) // heads // (seq // R)).to(tl.int64)
    token = (block * R + tl.arange(0, R)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    o = tl.load(out + batch * out_batch + head * out_head + token * out_token + column).to(tl.float32)
    d = tl.load(d_out + batch * d_out_batch + head * d_out_head + token * d_out_token + column).to(tl.float32)
    row = batch * heads + head
    first = row * seq + block * R
    here = tl.arange(0, R)
    tl.store(logs + first * 2 + here, tl.load(lse + first + here) * lse_factor)
    tl.store(logs + first * 2 + R + here, -tl.sum(o * d, 1))
    if value_sums is not None:
        place = (batch * (seq // R) + block) * heads + head
        tl.store(value_sums + place * WIDTH + tl.arange(0, WIDTH), tl.sum(d, 0))
    if sums is not None:
        square = tl.sum(d * d, 1)
        norm = tl.where(square > LEAST * LEAST, tl.sqrt(square), tl.where(square == square, LEAST, square))
        tl.store(inverse + first + here, 1 / norm)
        tl.store(sums + first * WIDTH + tl.arange(0, R * WIDTH), tl.zeros([R * WIDTH], tl.int32))
        if head % GROUP == 0:
            kv = head // GROUP
            keys = tl.load(k + batch * k_batch + kv * k_head + token * k_token + column).to(tl.float32)
            values = tl.load(v + batch * v_batch + kv * v_head + token * v_token + column).to(tl.float32)
            _raise(largest + 2 * (row // GROUP), tl.abs(keys))
            _raise(largest + 2 * (row // GROUP) + 1, tl.sqrt(tl.sum(values * values, 1)))


@triton.jit
def _attention_after(
    sums, inverse, largest, d_q, found, query_sums, seq, heads, token_stride, head_stride, plain_scale,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, UNITS: tl.constexpr, LEAST: tl.constexpr, TWICE: tl.constexpr,
    FOUND: tl.constexpr,
):  # fmt: skip
    """Write dQ of R queries of a head from its sums. Raise one of the FOUND maxima of all gradients, and write the sum of dQ, if these are
    wanted.

    The sums of heads of 128 are stored by rows; those of heads of 64 by 16 rows, 8 columns, half of the 16 rows, column of a pair, row of 8,
    pair of columns.
    """
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % (seq // R)
    batch = (tl.program_id(0) // heads // (seq // R)).to(tl.int64)
    token = (batch * seq + block * R + tl.arange(0, R)) * token_stride + head * head_stride
    row = batch * heads + head
    pair = largest + 2 * (row // GROUP)
    most = tl.maximum(TWICE * tl.load(pair) * tl.load(pair + 1), LEAST, propagate_nan=tl.PropagateNan.ALL)
    unit = (most / UNITS) * plain_scale / tl.load(inverse + row * seq + block * R + tl.arange(0, R))
    x = tl.load(sums + (row * seq + block * R) * WIDTH + tl.arange(0, R * WIDTH))
    if WIDTH == 64:
        x = tl.permute(tl.reshape(x, [R // 16, WIDTH // 8, 2, 2, 8, 4]), [0, 2, 4, 1, 5, 3])
    x = tl.reshape(x, [R, WIDTH]).to(tl.float32) * unit[:, None]
    if query_sums is not None:
        place = (batch * (seq // R) + block) * heads + head
        # In two steps: in one, Triton (3.6 and 3.7) takes the lanes that have the rows of a column to be adjacent, which they are not.
        by_eight = tl.sum(tl.reshape(x, [R // 8, 8, WIDTH]), 0)
        tl.store(query_sums + place * WIDTH + tl.arange(0, WIDTH), tl.sum(by_eight, 0))
    x = x.to(d_q.dtype.element_ty)
    tl.store(d_q + token[:, None] + tl.arange(0, WIDTH)[None, :], x)
    if found is not None:
        _raise(found + tl.program_id(0) % FOUND, tl.abs(x.to(tl.float32)))


def room_beside(q: Tensor, k: Tensor, v: Tensor, beside: bool) -> Sequence[Tensor]:
    """Return uninitialised gradients of q, k and v [batch, seq, heads, head_dim], contiguous or beside each other.

    If q, k and v are parts of one tensor, so are gradients beside each other: they are the gradient of that tensor, and nothing has to join
    them."""
    tensors, (batch, seq), token = (q, k, v), q.shape[:2], q.stride(1)
    together = all(
        t.untyped_storage().data_ptr() == q.untyped_storage().data_ptr() and t.stride()[:2] == (seq * token, token)
        for t in tensors
    )
    # Kernels of tiles write dK and dV with the same strides.
    apart = len({t.storage_offset() for t in tensors}) == 3 and k.stride() == v.stride()
    if not beside or not together or not apart or sum(t.numel() for t in tensors) != batch * seq * token:
        return [q.new_empty(t.shape) for t in tensors]
    whole = q.new_empty(batch * seq * token)
    first = min(t.storage_offset() for t in tensors)
    return [whole.as_strided(t.shape, t.stride(), t.storage_offset() - first) for t in tensors]


class TokenSums(NamedTuple):
    """Sums of dQ and of dO over the tokens of a sample, or of parts of it. None of them if they are not wanted."""

    queries: Tensor | None  # [parts, heads x head_dim]
    values: Tensor | None  # [parts, heads x head_dim]

    @staticmethod
    def of(q: Tensor, parts: int, wanted: bool) -> TokenSums:
        batch, seq, heads, width = q.shape
        if not wanted:
            return TokenSums(None, None)
        rows = (batch * parts, batch * (seq // _SIDE.value))
        return TokenSums(*(q.new_empty((n, heads * width), dtype=torch.float32) for n in rows))

    def all(self, head_dim: int) -> Tensor | None:
        """Return the sums over all tokens of dQ, dK and dV, a query head's next to each other: [heads x 3 x head_dim].

        For every query the shares of the keys sum to 1: so the sum of dV is that of dO, and the sum of dK is zero.
        """
        if self.queries is None or self.values is None:
            return None
        d_q, d_v = (sum_rows(parts, torch.float32).view(-1, head_dim) for parts in (self.queries, self.values))
        return torch.stack((d_q, torch.zeros_like(d_q), d_v), 1).flatten()


def prepare(
    out: Tensor, d_out: Tensor, lse: Tensor, lse_factor: float, values: Tensor | None, adding: Sequence[Tensor | None] = (None,) * 5
) -> Tensor:  # fmt: skip
    """Return lse times a factor and minus delta for each block of queries of a head.

    Args:
        values: gets the sums of dO that `TokenSums` has.
        adding: k, v, and what else dQ is added with: 1 / the norms of dO, the largest magnitudes in K and norms of V, and the sums.
    """
    batch, seq, heads, width = out.shape
    k, v, inverse, largest, sums = adding
    logs = torch.empty((batch * heads * seq // _SIDE.value, 2 * _SIDE.value), dtype=torch.float32, device=out.device)
    strides = [stride for x in (out, d_out, k, v) for stride in ((0, 0, 0) if x is None else x.stride()[:3])]
    # One warp exchanges nothing with others for the sums of d_out's columns. With heads of 128 its registers do not suffice.
    warps = 1 if sums is None and width == 64 else 4
    _attention_before[(len(logs),)](
        out, d_out, k, v, lse, logs, inverse, largest, sums, values, lse_factor, seq, heads, *strides,
        1 if k is None else heads // k.shape[2], width, _SIDE.value, _LEAST.value, num_warps=warps,
    )  # fmt: skip
    return logs


def run_backward(
    kernel: Any, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, last: Tensor | None,
    beside: bool, measured: bool, summed: bool, lse_factor: float, by_tiles: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v by a backward kernel that adds to sums of dQ. The other arguments are those of
    `hopper_backward.attend_backward`.

    The kernel reads lse multiplied by a factor. If `by_tiles`, it has TMA descriptors of the sums and of the inverse norms of dO.
    """
    batch, seq, heads, width = q.shape
    kv_heads, side = k.shape[2], _SIDE.value
    group, key_blocks = heads // kv_heads, seq // (side * _WORKERS.value)
    gradients = d_q, d_k, d_v = room_beside(q, k, v, beside)
    sums = torch.empty((batch * heads * seq, width), dtype=torch.int32, device=q.device)
    inverse = torch.empty((batch * heads * seq // side, side), dtype=torch.float32, device=q.device)
    maxima = torch.zeros(batch * kv_heads * 2 + _FOUND.value, dtype=torch.int32, device=q.device)
    largest, found = maxima[: -_FOUND.value], maxima[-_FOUND.value :] if measured else None
    token_sums = TokenSums.of(q, seq // side, summed)
    logs = prepare(out, d_out, lse, lse_factor, token_sums.values, (k, v, inverse, largest, sums))
    largest = largest.view(torch.float32)
    targets = sums, inverse
    if by_tiles:
        targets = tiled(sums, side, _COLUMNS.value, _TILE), tiled(inverse, 1, side, LOGS)
    kernel[(batch * kv_heads * key_blocks,)](
        described(q, side), described(k, side), described(v, side), described(d_out, side),
        tiled(logs, 1, 2 * side, LOGS), d_k, d_v, *targets, largest, found, *bound(last),
        key_blocks, seq, q.stride(2), k.stride(2), v.stride(2), d_out.stride(2), *d_k.stride()[1:3],
        scale / math.log(2), scale, kv_heads, group, section(batch * kv_heads, key_blocks), last is not None, num_warps=4,
    )  # fmt: skip
    _attention_after[(len(logs),)](
        sums, inverse, largest, d_q, found, token_sums.queries, seq, heads, *d_q.stride()[1:3], scale, group, width, side,
        _UNITS.value, _LEAST.value, _TWICE.value, _FOUND.value, num_warps=4,
    )  # fmt: skip
    return noted_together(gradients, found, token_sums)


def noted_together(gradients: Sequence[Tensor], found: Tensor | None, sums: TokenSums) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v with what kernels found of them: the largest magnitudes in all three, and their sums over
    tokens."""
    d_q, d_k, d_v = gradients
    largest = None if found is None else found.view(torch.float32)
    for gradient in gradients:
        note(gradient, largest)
    note_sums(d_q, sums.all(d_q.shape[-1]))
    return d_q, d_k, d_v


def tiled(x: Tensor, rows: int, columns: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Return a TMA descriptor of a contiguous matrix."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)

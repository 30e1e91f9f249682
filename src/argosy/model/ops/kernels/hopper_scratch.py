"""Sums of dQ that an attention program has to itself: floats in global memory, each of which one thread adds to."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from argosy.model.ops.kernels.hopper_backward import _WIDTH
from argosy.model.ops.kernels.hopper_tiles import _SIDE

# A thread's own sums, four at a time. What one thread does to one place takes effect in its order.
_LOAD = gl.constexpr("ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];")
_LOAD_OPERANDS = gl.constexpr("=f,=f,=f,=f,l,l,l,l")
_STORE = gl.constexpr("st.relaxed.gpu.global.v4.f32 [$5], {$1, $2, $3, $4}; mov.u32 $0, 0;")
_ADD = gl.constexpr("red.relaxed.gpu.global.add.v4.f32 [$5], {$1, $2, $3, $4}; mov.u32 $0, 0;")
_KEEP_OPERANDS = gl.constexpr("=r,f,f,f,f,l,l,l,l")


@gluon.jit
def _own_places(target, SUM: gl.constexpr):
    """Return where threads keep their values of a block, which no other thread reads. Of four values next to each other in a thread the first's
    place counts."""
    row = gl.arange(0, _SIDE, gl.SliceLayout(1, SUM))[:, None]
    column = gl.arange(0, _WIDTH, gl.SliceLayout(0, SUM))[None, :]
    inner = ((row // 16) * (_WIDTH // 8) + column // 8) * 128 + ((row % 8) * 4 + (column % 8) // 2) * 4
    return (target + inner).to(gl.int64)


@gluon.jit
def _load_sum(target, SUM: gl.constexpr):
    """Return the sums of a block."""
    places = _own_places(target, SUM)
    return gl.inline_asm_elementwise(_LOAD, _LOAD_OPERANDS, [places], dtype=gl.float32, is_pure=False, pack=4)


@gluon.jit
def _keep_sum(values, target, HOW: gl.constexpr, SUM: gl.constexpr):
    """Store values as the sums of a block (_STORE), or add them to the sums (_ADD)."""
    places = _own_places(target, SUM)
    gl.inline_asm_elementwise(HOW, _KEEP_OPERANDS, [values, places], dtype=gl.int8, is_pure=False, pack=4)

"""What follows a product on Hopper, one block of 32 columns of a worker's tile at a time (`hopper_matmul`).

THEN names it:

    "activation"  gate and up, and the activation of a gated MLP
    "gradients"   the gradients of gate and up
    "sum"         the residual stream plus the product and a bias
    "heads"       queries, keys and values, of which rope turns the first two
    "product"     nothing: only the writing is beside the next tile's matmul

A block is read from shared memory, where the whole tile of the worker is. It is computed beside a step of the next tile's matmul, so what
it reads from memory is loaded one step earlier (`_saved_block`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from argosy.model.ops.kernels.activation_kernel import activation_slope, activation_value

# Workers of a program, tokens of each, and columns of a tile and of a block.
_WORKERS, _TOKENS, _COLUMNS, _BLOCK = gl.constexpr(2), gl.constexpr(64), gl.constexpr(256), gl.constexpr(32)
# A thread has 8 columns of a row, 16 bytes.
_PLACES = gl.constexpr(gl.BlockedLayout([1, 8], [256 // _BLOCK.value, _BLOCK.value // 8], [4, 1], [1, 0]))


@gluon.jit
def _rows(row, WORKER: gl.constexpr):
    """Return the tokens of a worker's tile."""
    return (row * _WORKERS + WORKER) * _TOKENS + gl.arange(0, _TOKENS, gl.SliceLayout(1, _PLACES))


@gluon.jit
def _block_columns(block, column, SPAN: gl.constexpr):
    """Return the columns of a block, of tiles that have SPAN columns of each factor."""
    return column * SPAN + block * _BLOCK + gl.arange(0, _BLOCK, gl.SliceLayout(0, _PLACES))


@gluon.jit
def _block_place(block, row, column, form, WORKER: gl.constexpr, SPAN: gl.constexpr):
    """Return the places of the elements of a block of a worker's product, and which of them exist."""
    height, width, _ = form
    rows = _rows(row, WORKER)
    columns = _block_columns(block, column, SPAN)
    at = rows.to(gl.int64)[:, None] * width + columns[None, :]
    return at, (rows < height)[:, None] & (columns < width)[None, :]


@gluon.jit
def _slot(block, column, GROUP: gl.constexpr, HEAD: gl.constexpr):
    """Return the KV head of a block of columns, and its place among the slots of that: query heads, key, value."""
    slot = (column * _COLUMNS + block * _BLOCK) // HEAD
    return slot // (GROUP + 2), slot % (GROUP + 2)


@gluon.jit
def _half_blocks(KIND: gl.constexpr):
    """Return the number of blocks that half a head has."""
    return KIND[1] // 2 // _BLOCK


@gluon.jit
def _in_turn(number, KIND: gl.constexpr, THEN: gl.constexpr):
    """Return the block that is finished as the one with this number. Blocks that rope turns by the same angles follow each other."""
    if THEN == "heads":
        ALIKE: gl.constexpr = _COLUMNS // _BLOCK // _half_blocks(KIND)
        number = number % ALIKE * _half_blocks(KIND) + number // ALIKE
    return number


@gluon.jit
def _saved_block(
    number, row, column, before, saved, form, WORKER: gl.constexpr, KIND: gl.constexpr, THEN: gl.constexpr
):  # fmt: skip
    """Return what is read beside the block with this number: gate and up that the forward pass has saved, the stream, or cos and sin of
    rope, if they are not those of the block before."""
    first, second = before
    if THEN == "gradients" or THEN == "sum":
        at, inside = _block_place(number, row, column, form, WORKER, _COLUMNS)
        first = gl.load(saved[0] + at, mask=inside, other=0.0)
        if THEN == "gradients":
            second = gl.load(saved[1] + at, mask=inside, other=0.0)
    elif THEN == "heads":
        HALF: gl.constexpr = KIND[1] // 2
        if number % (_COLUMNS // HALF) == 0:
            height, _, rope_rows = form
            rows = _rows(row, WORKER)
            columns = number // (_COLUMNS // HALF) * _BLOCK + gl.arange(0, _BLOCK, gl.SliceLayout(0, _PLACES))
            inside = (rows < height)[:, None] & (columns < HALF)[None, :]
            at = (rows % rope_rows)[:, None] * HALF + columns[None, :]
            first = gl.load(saved[0] + at, mask=inside, other=0.0)
            second = gl.load(saved[1] + at, mask=inside, other=0.0)
    return first, second


@gluon.jit
def _with_bias(total, bias, block, column, form):
    """Return a block of the sum with the bias of its columns."""
    columns = _block_columns(block, column, _COLUMNS)
    return total + gl.load(bias + columns, mask=columns < form[1], other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _write_head(
    x, other, turn, block, row, column, outs, form, WORKER: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr
):
    """Write a block of a query, key or value head. `other` is the block that rope turns it with."""
    height, width, _ = form
    kv_head, place = _slot(block, column, GROUP, HEAD)
    out = outs[0]
    heads = width // ((GROUP + 2) * HEAD)
    head = kv_head
    if place < GROUP:
        head = kv_head * GROUP + place
        heads = heads * GROUP
    elif place == GROUP:
        out = outs[1]
    else:
        out = outs[2]
    if place <= GROUP:
        # The first half of a head turns towards the second, and the second away from the first.
        sign = gl.where(block * _BLOCK % HEAD < HEAD // 2, -1.0, 1.0)
        x = (x.to(gl.float32) * turn[0] + other.to(gl.float32) * (turn[1] * sign)).to(gl.bfloat16)
    rows = _rows(row, WORKER)
    first = head * HEAD + block * _BLOCK % HEAD
    columns = gl.arange(0, _BLOCK, gl.SliceLayout(0, _PLACES))
    # The compiler does not find these multiples, without which it would write element by element.
    at = rows.to(gl.int64)[:, None] * gl.multiple_of(heads * HEAD, 16) + (gl.multiple_of(first, 16) + columns)[None, :]
    inside = (rows < height)[:, None] & (_block_columns(block, column, _COLUMNS) < width)[None, :]
    gl.store(out + at, x, mask=inside)


@gluon.jit
def _finish(
    number, row, column, here, inputs, saved, outs, form, WORKER: gl.constexpr, KIND: gl.constexpr, THEN: gl.constexpr
):  # fmt: skip
    """Compute what follows the block with this number of a complete product, and write it."""
    block = _in_turn(number, KIND, THEN)
    SPAN: gl.constexpr = _COLUMNS // 2 if THEN == "activation" else _COLUMNS
    first = WORKER * (_COLUMNS // _BLOCK) + block
    at, inside = _block_place(block, row, column, form, WORKER, SPAN)
    product = here.index(first).load(_PLACES)
    if THEN == "activation":
        up = here.index(first + SPAN // _BLOCK).load(_PLACES)
        gl.store(outs[0] + at, product, mask=inside)
        gl.store(outs[1] + at, up, mask=inside)
        value = activation_value(product.to(gl.float32), KIND) * up.to(gl.float32)
        gl.store(outs[2] + at, value.to(gl.bfloat16), mask=inside)
    elif THEN == "gradients":
        d = product.to(gl.float32)
        gate = inputs[0].to(gl.float32)
        d_gate = d * inputs[1].to(gl.float32) * activation_slope(gate, KIND)
        gl.store(outs[0] + at, d_gate.to(gl.bfloat16), mask=inside)
        gl.store(outs[1] + at, (d * activation_value(gate, KIND)).to(gl.bfloat16), mask=inside)
    elif THEN == "product":
        gl.store(outs[0] + at, product, mask=inside)
    elif THEN == "heads":
        other = here.index(WORKER * (_COLUMNS // _BLOCK) + (block ^ _half_blocks(KIND))).load(_PLACES)
        _write_head(product, other, inputs, block, row, column, outs, form, WORKER, KIND[0], KIND[1])
    else:
        total = inputs[0].to(gl.float32) + product.to(gl.float32)
        if saved[1] is not None:
            total = _with_bias(total, saved[1], block, column, form)
        gl.store(outs[0] + at, total.to(gl.bfloat16), mask=inside)

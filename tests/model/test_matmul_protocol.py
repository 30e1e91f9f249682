"""The protocol of the matmul kernel that computes beside a tile's matmul what follows another: who loads, reads and frees what, when.

It is simulated on any machine, as those of the attention kernels are (`test_hopper_protocol`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")

from argosy.model.ops.kernels import hopper_finish, hopper_matmul
from model.simulated_hopper import Fault, Machine, Matrix, Pointer, Slots

Names = dict[str, Any]
Spoil = Callable[[Names], object]

# In small: tokens of a worker, columns of a tile and of a block, the depth of a step, and tiles below each other.
SMALL = {"_TOKENS": 4, "_COLUMNS": 16, "_BLOCK": 2, "_DEPTH": 4, "_BAND": 3}
FORMS = ("activation", "gradients", "sum", "sum without a bias", "heads", "product")
# Query heads of a KV head, and the size of a head: half of one is a block of columns or several, and a whole one at most a tile.
GROUP, HEADS = 3, (4, 8, 16)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def value(x: Any, _: object) -> Any:
    return x * sigmoid(x)


def slope(x: Any, _: object) -> Any:
    return sigmoid(x) * (1 + x * (1 - sigmoid(x)))


def put(x: Any, here: Slots, first: int, width: int) -> None:
    for block in range(width // SMALL["_BLOCK"]):
        here.index(first + block).store(x[:, block * SMALL["_BLOCK"] :][:, : SMALL["_BLOCK"]])


def with_blocks(allocate: Callable[..., Slots], dtype: str, shape: list[int], layout: object) -> Slots:
    """Fill the blocks of products: those of the tile before the first, which there is not, are read too."""
    slots = allocate(dtype, shape, layout)
    if shape[1:] == [SMALL["_TOKENS"], SMALL["_BLOCK"]]:
        for slot in slots.items:
            slot.store(np.full(shape[1:], np.nan, np.float32))
    return slots


class Problem:
    """Factors, what is read beside their product, and the results that a form writes."""

    def __init__(self, seed: int, form: str, tokens: int, depth: int, width: int) -> None:
        drawn = np.random.default_rng(seed)
        self.form, self.tokens, self.depth, self.width = form, tokens, depth, width

        def matrix(*shape: int) -> Any:
            return drawn.standard_normal(shape, np.float32)

        self.head = HEADS[seed % len(HEADS)]
        if form == "heads":
            slots = (GROUP + 2) * self.head
            self.width = width = -(-width // slots) * slots
        self.a, self.b, self.b_up = matrix(tokens, depth), matrix(width, depth), matrix(width, depth)
        self.saved = [matrix(tokens, width), matrix(width) if form == "sum" else matrix(tokens, width)]
        # Rows of cos and sin.
        self.rope_rows = int(drawn.integers(1, tokens + 1))
        if form == "heads":
            self.saved = [matrix(self.rope_rows, self.head // 2), matrix(self.rope_rows, self.head // 2)]

    def heads(self, product: Any) -> list[Any]:
        """Return queries, keys and values of a product, turned by the saved cos and sin."""
        slots = product.reshape(self.tokens, -1, GROUP + 2, self.head)
        cos, sin = (np.resize(table, (self.tokens, self.head // 2))[:, None, None] for table in self.saved)
        first, second = slots[:, :, :-1, : self.head // 2], slots[:, :, :-1, self.head // 2 :]
        turned = np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
        parts = turned[:, :, :GROUP], turned[:, :, GROUP], slots[:, :, -1]
        return [part.reshape(self.tokens, -1) for part in parts]

    def results(self) -> list[Any]:
        product, first, second = self.a @ self.b.T, *self.saved
        if self.form == "product":
            return [product]
        if self.form == "heads":
            return self.heads(product)
        if self.form == "activation":
            up = self.a @ self.b_up.T
            return [product, up, value(product, None) * up]
        if self.form == "gradients":
            return [product * second * slope(first, None), product * value(first, None)]
        return [first + product + (second if self.form == "sum" else 0)]


def multiply(seed: int, problem: Problem, programs: int, spoil: Spoil = id) -> None:
    """Run the kernel, and compare its results with the expected ones."""
    form, then = problem.form, problem.form.split()[0]
    span = SMALL["_COLUMNS"] // (2 if form == "activation" else 1)
    expected = problem.results()
    outs = [Matrix(np.full(x.size, np.nan, np.float32)) for x in expected]
    machine = Machine(seed)
    names = machine.namespace((hopper_finish, hopper_matmul))
    names |= SMALL | {"activation_value": value, "activation_slope": slope, "_put": put}
    vars(names["gl"]).update(allocate_shared_memory=partial(with_blocks, names["gl"].allocate_shared_memory))
    spoil(names)
    saved = [Pointer(Matrix(x.ravel())) for x in problem.saved]
    reads = {"activation": 0, "gradients": 2, "sum": 2, "sum without a bias": 1, "heads": 2, "product": 0}[form]
    kind = (GROUP, problem.head) if form == "heads" else None
    row_tiles, column_tiles = -(-problem.tokens // (2 * SMALL["_TOKENS"])), -(-problem.width // span)
    machine.run(
        names["_gemm_beside"], min(programs, row_tiles * column_tiles), Matrix(problem.a),
        Matrix(problem.b.T.copy() if form == "gradients" else problem.b), Matrix(problem.b_up),
        *[*saved[:reads], None, None][:2], *[*map(Pointer, outs), None, None][:3], row_tiles, column_tiles,
        -(-problem.depth // SMALL["_DEPTH"]), problem.tokens, problem.width, problem.rope_rows, kind, then,
    )  # fmt: skip
    for found, right in zip(outs, expected, strict=True):
        if not (found.written == 1).all():
            raise Fault("a result is not written once")
        if not np.allclose(found.values.reshape(right.shape), right, atol=1e-4):
            raise Fault("a result is wrong")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(8))
def test_products_are_right_in_every_order_of_their_parts(seed: int, form: str) -> None:
    drawn = random.Random(seed)
    tokens, width, depth = drawn.randint(1, 40), drawn.randint(1, 50), drawn.randint(29, 60)
    multiply(seed, Problem(seed, form, tokens, depth, width), drawn.randint(1, 4))


def free_at_once(multiply: Callable[..., Any], total: Any, stage: int, phase: int, ring: Any, *given: Any) -> Any:
    result = multiply(total, stage, phase, ring, *given)
    ring[3].index(stage).missing = 0
    ring[3].index(stage).add_bytes(0)
    return result


FAULTS: dict[str, Spoil] = {
    "nothing is waited for": lambda names: vars(names["mbarrier"]).update(wait=lambda *_: None),
    "a matmul less is waited for": lambda names: names.update(
        warpgroup_mma_wait=lambda most, deps, wait=names["warpgroup_mma_wait"]: wait(most + 1, deps)
    ),
    "a stage is free as soon as it is read": lambda names: names.update(_multiply=partial(free_at_once, names["_multiply"])),
    "the parity of a stage does not change": lambda names: names.update(_next=lambda stage, phase: ((stage + 1) % 3, phase)),
    "all tiles are the same": lambda names: names.update(_place=lambda *_: (0, 0)),
    "what follows is of another block": lambda names: names.update(
        _saved_block=lambda block, *given, saved=names["_saved_block"]: saved(0, *given)
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulation_finds_faults(fault: str) -> None:
    with pytest.raises(Fault):
        multiply(0, Problem(0, "sum", 30, 40, 40), 2, FAULTS[fault])

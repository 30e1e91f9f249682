"""The protocols of Argosy's attention kernels for Hopper: who loads, reads and frees what, when. They are simulated on any machine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels need triton, which the dev extra brings on Linux")

from argosy.model.ops.kernels import (
    hopper_backward,
    hopper_backward_128,
    hopper_backward_head,
    hopper_forward,
    hopper_scheduler,
    hopper_scratch,
    hopper_sums,
    hopper_tiles,
)
from argosy.model.ops.kernels.hopper_tiles import largest_divisor
from model.simulated_hopper import Fault, Machine, Matrix, Number, Pointer, tensor

Names = dict[str, Any]

# In small: the width of a head, of the forward pass a worker's queries and a block's keys, of the backward pass both.
WIDTH, QUERIES, KEYS, SIDE = 4, 4, 8, 16
SCALE = 0.4


class Problem:
    """Queries, keys, values and the gradient of the output, [batch, seq, heads, WIDTH], and the first key that each query sees."""

    def __init__(self, seed: int, batch: int, seq: int, kv_heads: int, group: int, *, bounded: bool) -> None:
        values = np.random.default_rng(seed)
        self.batch, self.seq, self.kv_heads, self.group, self.heads = batch, seq, kv_heads, group, kv_heads * group
        sizes = (self.heads, kv_heads, kv_heads, self.heads)
        self.q, self.k, self.v, self.d_out = (values.standard_normal((batch, seq, n, WIDTH), np.float32) for n in sizes)
        self.bounded = bounded
        self.firsts = self._first_keys(random.Random(seed)) if bounded else np.zeros((batch, seq), int)

    def _first_keys(self, drawn: random.Random) -> Any:
        """Draw documents of random lengths, or a window."""
        share, window = drawn.choice([0.03, 0.1, 0.5, 0]), drawn.randrange(1, self.seq)
        firsts = np.zeros((self.batch, self.seq), int)
        for sample in firsts:
            for query in range(1, self.seq):
                begins = drawn.random() < share
                sample[query] = max(sample[query - 1], query if begins else 0 if share else query - window)
        return firsts

    def last_queries(self) -> Any:
        """Return the last query that sees each key."""
        places = np.arange(self.seq)
        sees = (self.firsts[:, :, None] <= places) & (places <= places[:, None])
        return self.seq - 1 - sees[:, ::-1].argmax(1)

    def weights(self) -> tuple[Any, Any]:
        """Return the weights of the keys, [batch, heads, seq, seq], and the log-sum-exp of the scores."""
        places = np.arange(self.seq)
        hidden = (places > places[:, None]) | (places < self.firsts[:, :, None])
        scores = np.einsum("bqhd,bkhd->bhqk", self.q, np.repeat(self.k, self.group, 2)) * SCALE
        scores = np.where(hidden[:, None], -np.inf, scores)
        lse = np.log(np.exp(scores).sum(-1))
        return np.exp(scores - lse[..., None]), lse

    def out(self) -> Any:
        return np.einsum("bhqk,bkhd->bqhd", self.weights()[0], np.repeat(self.v, self.group, 2))

    def delta(self) -> Any:
        return (self.out() * self.d_out).sum(-1).transpose(0, 2, 1)

    def gradients(self) -> tuple[Any, Any, Any]:
        p = self.weights()[0]
        d_p = np.einsum("bqhd,bkhd->bhqk", self.d_out, np.repeat(self.v, self.group, 2))
        d_s = p * (d_p - self.delta()[..., None]) * SCALE
        d_k, d_v = np.einsum("bhqk,bqhd->bkhd", d_s, self.q), np.einsum("bhqk,bqhd->bkhd", p, self.d_out)
        shared = (self.batch, self.seq, self.kv_heads, self.group, WIDTH)
        d_q = np.einsum("bhqk,bkhd->bqhd", d_s, np.repeat(self.k, self.group, 2))
        return d_q, d_k.reshape(shared).sum(3), d_v.reshape(shared).sum(3)


def matrix(x: Any) -> Matrix:
    return Matrix(x.reshape(x.shape[0] * x.shape[1], -1))


def room(*shape: int) -> Matrix:
    return Matrix(np.full(shape, np.nan, np.float32))


def compare(found: list[Matrix], right: list[Any]) -> None:
    for ours, theirs in zip(found, right, strict=True):
        if not (ours.written == 1).all():
            raise Fault("a result is not written once")
        if not np.allclose(ours.values.reshape(theirs.shape), theirs, atol=1e-4):
            raise Fault("a result is wrong")


def forward(
    seed: int, problem: Problem, team: tuple[int, int, int], section: int, programs: int, spoil: Callable[[Names], object] = id
) -> None:  # fmt: skip
    """Run the forward kernel, and compare its results with the expected ones.

    Args:
        team: workers, stages and slots of queries, as `hopper_forward._TEAMS` has them.
        spoil: changes the names that the kernel uses.
    """
    batch, seq, kv_heads, heads, group = problem.batch, problem.seq, problem.kv_heads, problem.heads, problem.group
    workers, stages, q_slots = team
    out, lse = room(batch * seq, heads * WIDTH), room(batch * heads * seq)
    head_tiles = -(-seq // QUERIES * group // workers)
    tiles = head_tiles * batch * kv_heads
    machine = Machine(seed)
    names = machine.namespace((hopper_scheduler, hopper_forward))
    names |= {"_QUERIES": QUERIES, "_KEYS": KEYS}
    spoil(names)
    bounds = (Pointer(Matrix(problem.firsts.ravel())), seq) if problem.bounded else (None, 0)
    machine.run(
        names["_attention_forward"], min(programs, tiles), *map(matrix, (problem.q, problem.k, problem.v)), out, Pointer(lse), [0],
        *bounds, seq, *[WIDTH] * 4, tiles, head_tiles, SCALE / math.log(2), kv_heads, group, section, WIDTH, workers, stages, q_slots,
        problem.bounded,
    )  # fmt: skip
    compare([out, lse], [problem.out(), problem.weights()[1]])


def backward_by_heads(seed: int, problem: Problem, programs: int, spoil: Callable[[Names], object] = id) -> None:
    """Run the backward kernel whose programs have whole heads, and compare its results with the expected ones."""
    batch, seq, kv_heads, heads = problem.batch, problem.seq, problem.kv_heads, problem.heads
    d_q, d_k, d_v = (room(batch * seq, n * WIDTH) for n in (heads, kv_heads, kv_heads))
    query_sums = room(batch * kv_heads * WIDTH)
    logs = by_blocks(problem.weights()[1] * hopper_backward.LSE_FACTOR, -problem.delta())
    machine = Machine(seed)
    names = machine.namespace((hopper_scheduler, hopper_tiles, hopper_scratch, hopper_backward, hopper_backward_head))
    names |= {"_SIDE": SIDE, "_WIDTH": WIDTH, "_as_rows": as_rows, "_load_sum": load_sum, "_keep_sum": keep_sum}
    spoil(names)
    bounds = last_queries(problem)
    with_sums = problem.group == 1
    machine.run(
        names["_attention_backward_head"], programs, *map(matrix, (problem.q, problem.k, problem.v, problem.d_out)), logs, d_q, d_k,
        d_v, Pointer(room(programs * problem.group * seq * WIDTH)), Pointer(query_sums) if with_sums else None, None, [0], *bounds,
        batch * kv_heads, seq // (2 * SIDE), seq, *[WIDTH] * 7, SCALE / math.log(2), SCALE, kv_heads, problem.group, problem.bounded,
    )  # fmt: skip
    wanted = problem.gradients()
    compare([d_q, d_k, d_v], [*wanted])
    if with_sums:
        compare([query_sums], [wanted[0].sum(1)])


def backward_by_tiles(
    seed: int, problem: Problem, width: int, section: int, spoil: Callable[[Names], object] = id
) -> None:
    """Run the backward kernel for heads of a width whose programs have tiles of keys, and compare its results with the expected ones."""
    batch, seq, kv_heads, heads = problem.batch, problem.seq, problem.kv_heads, problem.heads
    module, kernel, lse_factor = hopper_backward, "_attention_backward", hopper_backward.LSE_FACTOR
    if width == 128:
        module, kernel, lse_factor = hopper_backward_128, "_attention_backward_128", -1 / SCALE
    sums = Matrix(np.zeros((batch * heads * seq, WIDTH), np.int64))
    d_k, d_v = (room(batch * seq * kv_heads * WIDTH) for _ in range(2))
    inverse = 1 / np.linalg.norm(problem.d_out, axis=-1).transpose(0, 2, 1)
    largest = np.stack((abs(problem.k).max((1, 3)), np.linalg.norm(problem.v, axis=-1).max(1)), -1)
    machine = Machine(seed)
    names = machine.namespace((hopper_sums, hopper_tiles, module))
    names |= {
        "_SIDE": SIDE,
        "_WIDTH": WIDTH,
        "_COLUMNS": WIDTH // 2,
        "_as_rows": as_rows,
        "_add": add,
        "_add_tile": machine.add_tile,
    }
    spoil(names)
    key_blocks = seq // (2 * SIDE)
    targets = (
        (sums, by_blocks(inverse))
        if width == 128
        else (Pointer(Matrix(sums.values.ravel())), Pointer(Matrix(inverse.ravel())))
    )
    machine.run(
        names[kernel], batch * kv_heads * key_blocks, *map(matrix, (problem.q, problem.k, problem.v, problem.d_out)),
        by_blocks(problem.weights()[1] * lse_factor, -problem.delta()), Pointer(d_k), Pointer(d_v), *targets,
        Pointer(Matrix(largest.astype(np.float32).ravel())), None, *last_queries(problem), key_blocks, seq, *[WIDTH] * 4, kv_heads * WIDTH,
        WIDTH, SCALE / math.log(2), SCALE, kv_heads, problem.group, section, problem.bounded,
    )  # fmt: skip
    bound = np.repeat(largest.prod(-1), problem.group, 1)[..., None] * names["_TWICE"] / inverse
    d_q = (sums.values.reshape(batch, heads, seq, WIDTH) * (bound / names["_UNITS"])[..., None] * SCALE).transpose(
        0, 2, 1, 3
    )
    wanted = problem.gradients()
    compare([d_k, d_v], [*wanted[1:]])
    if not np.allclose(d_q, wanted[0], atol=1e-4):
        raise Fault("dQ is wrong")


def by_blocks(*rows: Any) -> Matrix:
    """Return numbers of all queries, [batch, heads, seq] each, those of a block next to each other."""
    return Matrix(np.concatenate([x.reshape(-1, SIDE) for x in rows], 1).astype(np.float32))


def last_queries(problem: Problem) -> tuple[Pointer | None, int]:
    return (Pointer(Matrix(problem.last_queries().ravel())), problem.seq) if problem.bounded else (None, 0)


def add(values: Any, places: Pointer) -> None:
    """Add values, rounded, to the sums of a block, in the order of rows."""
    first = int(places.offset.min())
    places.memory.values[first : first + SIDE * WIDTH] += np.rint(np.asarray(values)).astype(np.int64).ravel()


def as_rows(memory: Any, rows: int, columns: int, _: object) -> Any:
    """Return a slot as rows, each of which can be loaded."""

    def row(number: int) -> Any:
        return SimpleNamespace(load=lambda _: tensor(memory.read().reshape(rows, columns)[number]))

    return SimpleNamespace(index=row)


def load_sum(target: Pointer, _: object) -> Any:
    return tensor(target.memory.values[_block(target)].reshape(SIDE, WIDTH))


def keep_sum(values: Any, target: Pointer, how: str, _: object) -> None:
    kept = 0 if how == hopper_scratch._STORE.value else target.memory.values[_block(target)]
    target.memory.values[_block(target)] = kept + np.asarray(values).ravel()


def _block(target: Pointer) -> slice:
    return slice(int(target.offset), int(target.offset) + SIDE * WIDTH)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("team", [*hopper_forward._TEAMS.values(), (3, 2, 1), (2, 3, 2)])
@pytest.mark.parametrize("seed", range(5))
def test_the_forward_pass_computes_attention_in_every_order_of_its_parts(
    seed: int, team: tuple[int, int, int], bounded: bool
) -> None:
    drawn = random.Random(seed)
    kv_heads, group, key_blocks = (
        drawn.choice([1, 2, 3, 4]),
        drawn.choice([1, 1, 2, 3, 5]),
        drawn.choice([1, 1, 2, 3, 5]),
    )
    problem = Problem(seed, drawn.choice([1, 2, 3]), key_blocks * KEYS, kv_heads, group, bounded=bounded)
    forward(seed, problem, team, largest_divisor(kv_heads, drawn.randint(1, kv_heads)), drawn.choice([1, 2, 4]))


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_programs_with_whole_heads_compute_gradients_in_every_order_of_their_parts(seed: int, bounded: bool) -> None:
    drawn = random.Random(seed)
    kv_heads, group, key_blocks = drawn.choice([1, 2, 3]), drawn.choice([1, 1, 2, 3]), drawn.choice([1, 2, 3, 4])
    problem = Problem(seed, drawn.choice([1, 2]), key_blocks * 2 * SIDE, kv_heads, group, bounded=bounded)
    backward_by_heads(seed, problem, drawn.choice([1, 2]), of_triton(seed))


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_programs_with_tiles_compute_gradients_in_every_order_of_their_parts(
    seed: int, bounded: bool, width: int
) -> None:
    drawn = random.Random(seed)
    kv_heads, group, key_blocks = drawn.choice([1, 2]), drawn.choice([1, 1, 2, 3]), drawn.choice([1, 2, 3])
    problem = Problem(seed, drawn.choice([1, 2]), key_blocks * 2 * SIDE, kv_heads, group, bounded=bounded)
    backward_by_tiles(seed, problem, width, drawn.randint(1, kv_heads), of_triton(seed))


def of_triton(seed: int) -> Callable[[Names], object]:
    """Take the code for Triton 3.9 or that for earlier versions, in turn."""
    return lambda names: names.update(TRITON_3_9=seed % 2 == 1)


def one_slot(names: Names) -> Callable[..., Any]:
    allocate = names["gl"].allocate_shared_memory

    def with_one_slot(dtype: str, shape: list[int], layout: object) -> Any:
        slots = allocate(dtype, shape, layout)
        # Those of queries and of results.
        if shape[1:] == [QUERIES, WIDTH]:
            slots.items = [slots.items[0]] * len(slots.items)
        return slots

    return with_one_slot


def free_by_one(init: Callable[..., None], full: Any, free: Any, *given: Any) -> None:
    init(full, free, *given)
    for barrier in free.items:
        barrier.init(1)


ANY_FAULTS: dict[str, Callable[[Names], object]] = {
    "nothing is waited for": lambda names: vars(names["mbarrier"]).update(wait=lambda *_: None),
    "stores are not waited for": lambda names: vars(names["tma"]).update(store_wait=lambda _: None),
    "a matmul less is waited for": lambda names: names.update(
        warpgroup_mma_wait=lambda most, deps, wait=names["warpgroup_mma_wait"]: wait(most + 1, deps)
    ),
}
FORWARD_FAULTS: dict[str, Callable[[Names], object]] = ANY_FAULTS | {
    "skipped blocks are not freed": lambda names: names.update(_skip=lambda ring, count, blocks, stages: count + blocks),
    "workers without queries work": lambda names: names.update(_has_queries=lambda *_: True),
    "all tiles are the same": lambda names: names.update(_split=lambda *_: (0, 0)),
    "the other keys are hidden": lambda names: names.update(_HIDE_AFTER=names["_HIDE_BEFORE"]),
    "one slot is taken for several": lambda names: vars(names["gl"]).update(allocate_shared_memory=one_slot(names)),
}  # fmt: skip
BACKWARD_FAULTS: dict[str, Callable[[Names], object]] = ANY_FAULTS | {
    "dS of unseen keys is not passed on": lambda names: names.update(_pass_over=lambda here, count, steps, worker: count + steps),
    "sums begin anew": lambda names: names.update(_turns_of_sum=lambda block, first, complete: (True, block >= complete)),
    "a sum is never complete": lambda names: names.update(_turns_of_sum=lambda block, first, complete: (block < first + 2, False)),
    "queries are visited in another order": lambda names: names.update(_visit=lambda step, first, end, up, group: (end - 1 - step // group, step % group)),
    "one slot of keys is taken for two": lambda names: names.update(_KEY_SLOTS=1),
}  # fmt: skip


TILE_FAULTS: dict[str, Callable[[Names], object]] = {
    "nothing is waited for": ANY_FAULTS["nothing is waited for"],
    "a matmul less is waited for": ANY_FAULTS["a matmul less is waited for"],
    "all programs have the same keys": lambda names: names.update(_place=lambda *_: (Number(0), Number(0))),
    "a stage is free when one worker has read it": lambda names: names.update(_init_steps=partial(free_by_one, names["_init_steps"])),
    "the last block of queries is left out": lambda names: names.update(_steps=lambda *given, steps=names["_steps"]: steps(*given) - 1),
}  # fmt: skip


@pytest.mark.parametrize("fault", FORWARD_FAULTS)
def test_the_simulation_finds_faults_of_the_forward_pass(fault: str) -> None:
    # The last of the three tiles of a KV head leaves a worker without queries.
    problem = Problem(0, 2, 4 * QUERIES, 2, 2, bounded=False)
    with pytest.raises(Fault):
        forward(0, problem, hopper_forward._TEAMS[64], 1, 2, FORWARD_FAULTS[fault])


@pytest.mark.parametrize("fault", BACKWARD_FAULTS)
def test_the_simulation_finds_faults_of_the_backward_pass(fault: str) -> None:
    problem = Problem(0, 2, 6 * SIDE, 2, 1, bounded=False)
    with pytest.raises(Fault):
        backward_by_heads(0, problem, 2, BACKWARD_FAULTS[fault])


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("fault", TILE_FAULTS)
def test_the_simulation_finds_faults_of_the_backward_pass_by_tiles(fault: str, width: int) -> None:
    problem = Problem(0, 1, 6 * SIDE, 1, 2, bounded=False)
    with pytest.raises(Fault):
        backward_by_tiles(0, problem, width, 1, TILE_FAULTS[fault])

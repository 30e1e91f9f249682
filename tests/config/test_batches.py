"""The batch size is a function of the samples consumed, as in Megatron; steps and samples convert to each other exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.batches import Batches
from argosy.config.resolve import resolve
from argosy.errors import ArgosyError

Write = Callable[..., Path]


def megatron_sizes(start: int, increment: int, ramp_samples: int, batch: int, steps: int) -> list[int]:
    """Return the batch sizes of the first steps by Megatron's rule.

    The batch grows by one increment for each share of the ramp's samples that is consumed. After the ramp it is full.
    """
    increments = (batch - start) // increment
    consumed, sizes = 0, []
    for _ in range(steps):
        size = batch if consumed > ramp_samples else start + consumed * increments // ramp_samples * increment
        sizes.append(min(size, batch))
        consumed += sizes[-1]
    return sizes


@given(
    start=st.integers(1, 20),
    increment=st.integers(1, 20),
    increments=st.integers(1, 12),
    samples=st.integers(1, 3000),
    steps=st.integers(0, 200),
)
def test_sizes_samples_and_steps_agree_with_counting(
    start: int, increment: int, increments: int, samples: int, steps: int
) -> None:
    batches = Batches(start + increment * increments, (start, increment, samples))
    sizes = megatron_sizes(start, increment, samples, batches.global_batch, steps)
    consumed = 0
    for number, size in enumerate(sizes):
        assert batches.samples(number) == consumed
        assert batches.size(consumed) == size
        assert batches.steps(consumed) == number
        assert batches.steps(consumed + 1) == number + 1
        consumed += size
    assert batches.samples(steps) == consumed
    assert sizes == sorted(sizes)
    back = 0
    for number, size in enumerate(reversed(sizes)):
        assert batches.steps_before(steps, back) == number
        assert batches.steps_before(steps, back + 1) == number + 1
        back += size
    assert batches.steps_before(steps, consumed + 1) > steps


@given(batch=st.integers(1, 1000), steps=st.integers(0, 10**6))
def test_without_a_ramp_every_step_is_alike(batch: int, steps: int) -> None:
    batches = Batches(batch)
    assert batches.samples(steps) == steps * batch
    assert batches.size(steps) == batch
    assert batches.steps(steps) == -(-steps // batch)
    assert batches.sizes == [batch]


@pytest.mark.parametrize(
    ("ramp", "key", "words"),
    [
        ({"start": 32, "increment": 8, "samples": 100}, "start", "not below train.global_batch 32"),
        ({"start": 8, "increment": 10, "samples": 100}, "increment", "32 - 8 = 24 is not a multiple of 10"),
        (
            {"start": 8, "increment": 6, "samples": 100},
            "increment",
            "8, 14, … samples are not all multiples of micro_batch 4",
        ),
        (
            {"start": 2, "increment": 6, "samples": 100},
            "start",
            "2, 8, … samples are not all multiples of micro_batch 4",
        ),
    ],
)
def test_a_ramp_that_cannot_work_is_refused_with_its_arithmetic(
    write_spec: Write, ramp: dict[str, int], key: str, words: str
) -> None:
    path = write_spec(train={"global_batch": 32, "steps": 9, "batch_rampup": ramp})
    with pytest.raises(ArgosyError) as refusal:
        resolve(path)
    assert refusal.value.key == f"train.batch_rampup.{key}"
    assert words in refusal.value.cause


def test_an_automatic_micro_batch_divides_every_size(write_spec: Write) -> None:
    ramp = {"start": 4, "increment": 2, "samples": 100}
    path = write_spec(train={"global_batch": 32, "steps": 9, "batch_rampup": ramp}, parallel="auto")
    assert resolve(path).spec.parallel.micro_batch == 2

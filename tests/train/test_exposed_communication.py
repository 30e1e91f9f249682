"""Exposed communication is the time in which NCCL's kernels run and no other kernel does, by axis and as a share of the step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.parallel.trace_ranges import BACKWARD, FORWARD, LEFT_OVER
from argosy.train.exposed_communication import difference, measure_exposure, union
from argosy.train.kernel_profile import STEP

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def ticks(spans: Iterable[tuple[float, float]]) -> set[int]:
    return {tick for start, end in spans for tick in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_intervals_are_joined_and_subtracted_like_sets_of_moments(some: Any, others: Any) -> None:
    joined, cut = union(some), difference(union(some), union(others))
    assert ticks(joined) == ticks(some)
    assert ticks(cut) == ticks(some) - ticks(others)
    for found in (joined, cut):
        assert sum(end - start for start, end in found) == len(ticks(found))


def event(cat: str, name: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "tid": 1, "args": args}


def launched(number: int, host: float, name: str, start: float, length: float, **args: Any) -> list[dict[str, Any]]:
    return [
        event("cuda_runtime", "cudaLaunchKernelExC", host, 1, correlation=number),
        event("kernel", name, start, length, correlation=number, **args),
    ]


def group(axis: str) -> dict[str, str]:
    return {"Process Group Description": axis}


def test_a_trace_by_hand_gives_the_numbers_that_were_counted_by_hand() -> None:
    reduce, gather = (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather",
    )
    trace = [
        event("user_annotation", STEP, 0, 4000),
        event("user_annotation", FORWARD, 0, 100),
        event("user_annotation", BACKWARD, 110, 200),
        event("user_annotation", LEFT_OVER, 320, 50),
        # The same range on the device is no pass of the host.
        event("gpu_user_annotation", BACKWARD, 0, 9000),
        event("cuda_runtime", "cudaStreamSynchronize", 150, 5),
        event("cuda_runtime", "cudaStreamSynchronize", 3900, 5),
        *launched(1, 10, "gemm", 1000, 1000),
        # 500 of 1000 us beside the first matmul.
        *launched(2, 20, gather, 1500, 1000, **group("mesh_tp")),
        *launched(3, 120, "gemm", 3000, 1000),
        # In the kernel no group: the range around the launch has it. 200 us before the second matmul and 300 after it.
        event("cpu_op", "record_param_comms", 199, 5, **group("mesh_dp_replicate")),
        *launched(4, 200, reduce, 2800, 1500),
        # Of all ranks, after the last pass, wholly exposed.
        *launched(5, 330, reduce, 5000, 700, **group("default_pg")),
        # A counter that belongs to no pass.
        *launched(6, 400, reduce, 5900, 100, **group("default_pg")),
        {"ph": "M", "name": "process_name"},
    ]
    found = measure_exposure(trace, ("dp_replicate", "tp"))
    assert found is not None
    assert found.step_ms == 6.0
    assert {axis: (time.busy, time.exposed, time.calls) for axis, time in found.axes.items()} == {
        "tp": (1.0, 0.5, 1),
        "dp_replicate": (1.5, 0.5, 1),
        "dp_replicate x tp": (0.8, 0.8, 2),
    }
    assert found.exposed_ms == pytest.approx(1.8)
    assert (found.in_pass, found.late, found.host_waits) == (2, 1, 1)
    assert "exposed communication: 30.0% of a step of 6.00 ms" in found.lines()[0]
    assert "2 of 3 collectives (67%)" in found.lines()[-1]


def test_two_axes_exposed_at_the_same_time_count_once_in_the_whole() -> None:
    trace = [
        event("user_annotation", STEP, 0, 1000),
        *launched(1, 10, "ncclDevKernel_SendRecv", 0, 600, **group("mesh_pp")),
        *launched(2, 20, "ncclDevKernel_AllGather", 400, 400, **group("mesh_tp")),
    ]
    found = measure_exposure(trace, ("pp", "tp"))
    assert found is not None
    assert [time.exposed for time in found.axes.values()] == [0.6, 0.4]
    assert found.share == pytest.approx(0.8)


def test_a_trace_without_steps_or_without_communication_says_nothing() -> None:
    assert measure_exposure([event("kernel", "gemm", 0, 10)], ("tp",)) is None
    alone = measure_exposure([event("user_annotation", STEP, 0, 20), event("kernel", "gemm", 0, 10)], ("tp",))
    assert alone is not None
    assert alone.lines() == []

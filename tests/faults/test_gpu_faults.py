"""Faults of ranks on NCCL, on the GPUs of this machine; one GPU is enough. `make faults-gpu` runs them side by side.

Each run is two real ranks. The rank to blame is named from its own evidence, all ranks go on from the last checkpoint, and the numbers
are those of an undisturbed run, bit for bit. The table at the end says how long each took: the bars are 60 s to name the rank, and 2
minutes until the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from dist.devices import ON_GPU
from faults import of_numbers, of_ranks
from faults.bench import Bench, Outcome

FAULTS: dict[str, Callable[[Bench], Outcome]] = {
    "SIGKILL to one rank": of_ranks.rank_killed,
    "SIGSTOP to one rank": of_ranks.rank_stopped,
    "an exception": of_ranks.exception,
    "the device is out of memory": of_ranks.device_out_of_memory,
    "NaN": of_numbers.not_a_number,
    "a collective times out": of_ranks.collective_timeout,
    "a collective left out": of_ranks.mismatch,
}
# Runs at a time: each has two ranks and their agent.
_AT_ONCE = 4
pytestmark = [] if ON_GPU else [pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes(bench: Bench) -> Iterator[dict[str, Future[Outcome]]]:
    with ThreadPoolExecutor(_AT_ONCE if ON_GPU else 1) as threads:
        undisturbed = threads.submit(bench.undisturbed)
        yield {name: threads.submit(fault, bench) for name, fault in FAULTS.items()}
        undisturbed.result()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_on_nccl(bench: Bench, outcomes: dict[str, Future[Outcome]], name: str) -> None:
    bench.record(f"{name}, {'NCCL' if ON_GPU else 'gloo'}", outcomes[name].result())

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dist.devices import ON_GPU
from dist.pool import Pool

collect_ignore = [] if ON_GPU else ["test_gpu_ranks.py"]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of ranks for all tests of a process."""
    made = Pool()
    yield made
    made.close()

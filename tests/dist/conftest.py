from __future__ import annotations

from collections.abc import Iterator

import pytest

from dist.devices import ON_GPU
from dist.pool import Pool

collect_ignore = [] if ON_GPU else ["test_gpu_ranks.py"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One pool of ranks for a file of tests."""
    made = Pool()
    yield made
    made.close()

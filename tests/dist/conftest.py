from __future__ import annotations

from collections.abc import Iterator

import pytest

from dist.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of ranks for the whole session."""
    made = Pool()
    yield made
    made.close()

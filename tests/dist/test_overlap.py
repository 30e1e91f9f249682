"""Collectives are launched while the pass they belong to runs: `argosy train --profile` shows it from the trace of real ranks."""

from __future__ import annotations

import pytest

from dist.pool import Pool
from dist.profiles import profile_steps


@pytest.mark.parametrize(
    ("layout", "axis"), [("dp_replicate=2", "dp_replicate"), ("dp_shard=2", "dp_shard"), ("tp=2", "tp"), ("pp=2", "pp")]
)
def test_a_profile_tells_exposed_communication_by_axis(pool: Pool, layout: str, axis: str) -> None:
    first, second = pool.run(2, profile_steps, "gpt", f"{layout} micro_batch=8")
    for rank in (first, second):
        assert rank.exposure.axes.keys() == {axis}
        time = rank.exposure.axes[axis]
        assert 0 < time.exposed <= time.busy
        assert time.calls >= 2
        assert 0 < rank.exposure.share < 1
    assert any("exposed communication" in line for line in first.lines)
    assert any(line.strip().startswith(axis) for line in first.lines)
    # The first rank speaks for all.
    assert second.lines == []

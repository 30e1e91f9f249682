"""What a rank is said to hold of a tensor is what it holds, however often and unevenly the tensor was cut."""

from __future__ import annotations

import numpy as np
import pytest

from dist.pool import Pool
from dist.slice_checks import held


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "rows", [9, 10, 16, 67]
)  # of 9, the ranks of tp get 5 and 4, and those of dp 2, 2, 1, 0 of the 5
def test_fsdp_after_tensor_parallelism_leaves_every_number_on_one_rank(pool: Pool, rows: int, dim: int) -> None:
    times = np.zeros((rows, 12))
    for boxes in pool.run(8, held, 4, 2, rows, dim):
        for box in boxes:
            times[box.slices] += 1
    assert (times == 1).all()

"""Megatron's blending rule as computed on x86: product and difference are rounded separately.

Megatron's compiled helper leaves it to the compiler whether `weight * sample - count` is one fused multiply-add. On ARM, and
with -mfma on x86, it is fused, and ties such as those of the weights 0.1, 0.2, 0.3 and 0.4 break differently. Python never fuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets import helpers

TIES = (0.1, 0.2, 0.3, 0.4)


def _fill(sets: Any, local: Any, weights: Sequence[float], limits: Sequence[float]) -> None:
    """Run the loop of helpers.cpp in Python. A set that has reached its limit is left out."""
    counts, numbers = [0.0] * len(weights), range(len(weights))
    for sample in range(len(sets)):
        place, chosen, most = max(float(sample), 1.0), -1, -float("inf")
        for number in numbers:
            product = weights[number] * place
            error = product - counts[number]
            if error > most and counts[number] < limits[number]:
                chosen, most = number, error
        sets[sample], local[sample] = chosen, int(counts[chosen])
        counts[chosen] += 1.0


def blending_indices(sets: Any, local: Any, weights: Any, num_datasets: int, size: int, verbose: bool) -> None:
    assert (len(weights), len(sets)) == (num_datasets, size)
    _fill(sets, local, np.asarray(weights).tolist(), [float("inf")] * num_datasets)


def exhaustive_blending_indices(sets: Any, local: Any, sizes: Any, num_datasets: int) -> None:
    limits = np.asarray(sizes).tolist()
    _fill(sets, local, [limit / float(sum(limits)) for limit in limits], limits)


def is_fused() -> bool:
    """Return True if Megatron's helper on this machine fuses, and so gives another order."""
    sets, local = np.zeros((2, 1000), np.int16), np.zeros((2, 1000), np.int64)
    for row, build in enumerate((helpers.build_blending_indices, blending_indices)):
        build(sets[row], local[row], np.array(TIES), len(TIES), 1000, False)
    return not np.array_equal(sets[0], sets[1])


@pytest.fixture(scope="module", autouse=True)
def megatron_blends_as_on_x86() -> Any:
    """Use Megatron's own helper if it does not fuse; otherwise replace it by the Python loop, in Megatron's builder too."""
    with pytest.MonkeyPatch.context() as patch:
        if is_fused():
            patch.setattr(helpers, "build_blending_indices", blending_indices)
            patch.setattr(helpers, "build_exhaustive_blending_indices", exhaustive_blending_indices)
        yield

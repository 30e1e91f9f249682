"""Counter-based random numbers for samples: a pure function of (seed, purpose, epoch, sample).

The generator is splitmix64, a counter run through a mixer, so number j of a sample is computed directly and a batch draws
for all its samples at once. numpy's generators are not used: creating one costs more than drawing for a sample, and numpy
guarantees their streams only within a release, while a run must resume identically after an upgrade.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from argosy.config.seeds import derive_seed
from argosy.data.samples.order import mix

Keys = npt.NDArray[np.uint64]
Fractions = npt.NDArray[np.float64]
# 2^64 / the golden ratio. It is odd, so the counter visits every 64-bit word.
_STEP = np.uint64(0x9E3779B97F4A7C15)


def sample_keys(seed: int, purpose: str, epochs: Iterable[int], samples: Iterable[int]) -> Keys:
    """Return one key per sample. `purpose` gives different uses of the same sample independent draws."""
    keys = [derive_seed(seed, purpose, int(e), int(s)) for e, s in zip(epochs, samples, strict=True)]
    return np.array(keys, np.uint64)


def words(keys: Keys, count: int) -> npt.NDArray[np.uint64]:
    """Return `count` random 64-bit words for each key.  # [keys, count]"""
    return mix(keys[:, None] + _STEP * np.arange(1, count + 1, dtype=np.uint64))


def fractions(keys: Keys, count: int) -> Fractions:
    """Return `count` numbers in [0, 1) for each key, with 53 random bits: floor(fraction x n) is uniform over 0..n-1."""
    return np.asarray((words(keys, count) >> np.uint64(11)) * 2.0**-53)

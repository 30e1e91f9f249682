"""Batches of random tokens in the shape of a run's samples, for benchmarks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from argosy.config.schema import RunSpec
from argosy.data.samples.windows import Batch
from argosy.tasks.task_registry import task_of


def synthetic_batch(spec: RunSpec, samples: int | None = None) -> Batch:
    """Return random tokens in the shape of the run's samples: a global batch, or `samples` samples."""
    rng = np.random.default_rng(spec.train.seed)

    def draw(length: int) -> npt.NDArray[np.int64]:
        return rng.integers(0, spec.model.vocab_size, (samples or spec.train.global_batch, length))

    return task_of(spec).synthetic(spec, draw)

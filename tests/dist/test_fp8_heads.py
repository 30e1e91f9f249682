"""The output head in 8-bit floats where ranks share its vocabulary, its tokens or its stages."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from argosy.model.ops import fp8_cross_entropy
from dist.pool import Pool
from dist.test_matrix import of_one_process, sized
from dist.training import Trace, spec_of, train_steps

KEYS = "train.precision=fp8 train.z_loss=0.01"


def train_counting(model: str, layout: str) -> tuple[Trace, int]:
    """Train two steps. Return also how often the head was multiplied in 8 bits."""
    calls: list[object] = []
    compute = fp8_cross_entropy.fp8_head_loss

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return compute(*arguments)

    with patch.object(fp8_cross_entropy, "fp8_head_loss", counted):
        return train_steps(model, layout, 2), len(calls)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("llama", "tp=2"), ("gpt", "tp=2 sp=false"), ("llama", "dp_shard=2 tp=2"), ("gpt", "cp=2"), ("gpt", "pp=2"), ("bert", "tp=2")],
)  # fmt: skip
def test_a_layout_multiplies_the_head_as_one_process_does(pool: Pool, model: str, layout: str) -> None:
    """Closely: each rank scales its rows of the head, and its layers', by the largest of them."""
    keys = f"{sized(f'{layout} {KEYS}')} model.layers=2"
    ranks = spec_of(model, keys).parallel.world_size
    expected, _ = train_counting(model, of_one_process(keys))
    found = pool.run(ranks, train_counting, model, keys)
    # The last stage of a pipeline alone has a head.
    with_head = [False, True] if "pp=" in layout else [True] * ranks
    assert [calls > 0 for _, calls in found] == with_head
    for trace, _ in found:
        np.testing.assert_allclose(trace.losses, expected.losses, rtol=1e-2)
        np.testing.assert_allclose(trace.norms, expected.norms, rtol=5e-2)

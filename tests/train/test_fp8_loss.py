"""A whole run with fp8 matmuls ends where one in bf16 does: the benchmark of that, and a short form of it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "fp8_loss.py"))
SMALL = [
    "model.layers=2",
    "model.hidden=32",
    "model.max_seq_len=32",
    "train.global_batch=4",
    "parallel.micro_batch=4",
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("steps", "changes", "learnt"), [(48, SMALL, 4.0), pytest.param(200, [], 2.5, marks=pytest.mark.slow)]
)
def test_a_run_in_8_bit_products_ends_with_the_loss_of_one_in_bf16(
    tmp_path: Path, steps: int, changes: list[str], learnt: float
) -> None:
    found = BENCHMARK["compare"](tmp_path, steps, changes)
    assert found.bf16 != found.fp8
    assert found.bf16 < learnt  # log(256) is 5.5
    assert abs(found.difference) < BENCHMARK["BAR"]

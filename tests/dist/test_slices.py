"""What a rank is said to hold of a tensor is what it holds, however often and unevenly the tensor was cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from argosy.compat.absent_peers import fake_ranks
from argosy.model import build
from argosy.parallel.mesh import make_mesh
from argosy.parallel.parallelize import parallelize
from argosy.train.loop import fresh_weights
from dist.pool import Pool
from dist.slice_checks import held
from dist.training import spec_of


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


@pytest.mark.parametrize(("layout", "most"), [("dp_replicate=4", 1.0), ("dp_shard=4", 0.3), ("dp_shard=2 pp=2", 0.3)])
def test_a_run_draws_little_more_of_the_model_than_its_rank_keeps(
    layout: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, draw, drawn = spec_of("llama", layout), build._draw, list[int]()
    monkeypatch.setattr(build, "_draw", lambda rows, *more: (drawn.append(rows.numel()), draw(rows, *more)))
    monkeypatch.setattr(build, "_BLOCK", 32)
    with fake_ranks(1, 4):
        mesh = make_mesh(spec.parallel, torch.device("cpu"))
        session: Any = SimpleNamespace(spec=spec, mesh=mesh, engine=parallelize(spec, mesh))
        found = dict(fresh_weights(session, None, []))
    whole = sum(p.numel() for p in build.build_model(spec.model, "meta").parameters() if p.ndim > 1)
    assert found
    assert most / 2 < sum(drawn) / whole <= most

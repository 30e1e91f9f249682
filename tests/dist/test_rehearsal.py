"""A rehearsal on ranks that do not exist counts what real ranks hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from argosy.errors import ArgosyError
from argosy.measure.rehearsal import Part, describe_rehearsal, hold, rehearse
from argosy.parallel.mesh import make_mesh
from dist.pool import Pool
from dist.training import spec_of

LAYOUTS = [
    ("gpt", "dp_replicate=2"),
    ("llama", "dp_shard=4"),
    ("moe", "dp_replicate=2 dp_shard=2"),
    ("gpt", "cp=2 dp_shard=2"),
    ("gpt", "tp=2 pp=2"),
]


def held(model: str, layout: str) -> Part:
    """By this rank of the pool."""
    spec = spec_of(model, layout)
    return hold(spec, make_mesh(spec.parallel, torch.device("cpu")))


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_what_a_rehearsal_counts_is_what_real_ranks_hold(pool: Pool, model: str, layout: str) -> None:
    spec = spec_of(model, layout)
    ranks = spec.parallel.world_size
    real: list[Part] = pool.run(ranks, held, model, layout)
    assert not dist.is_initialized()
    assert rehearse(spec, ranks) == [real[rank] for rank in range(0, ranks, ranks // spec.parallel.pp)]


def test_a_layout_far_larger_than_this_machine_is_rehearsed_and_described() -> None:
    spec = spec_of("llama", "dp_replicate=16 dp_shard=32 train.global_batch=1024")
    (part,) = rehearse(spec, 512)
    assert part.groups == {"dp_replicate": list(range(0, 512, 32)), "dp_shard": list(range(32))}
    told = "\n".join(describe_rehearsal(spec, [part]))
    assert "512 ranks" in told
    assert "0, 32, 64, 96, … 480" in told


def test_another_number_of_ranks_is_refused_with_both_numbers() -> None:
    with pytest.raises(ArgosyError, match=r"= 4 processes, and there are 1024 \(--world-size 1024\)"):
        rehearse(spec_of("gpt", "dp_shard=4"), 1024)


def test_a_dry_run_of_any_size_needs_no_ranks(write_spec: object, tmp_path: Path) -> None:
    from argosy.config.resolve import resolve
    from argosy.measure.dry_run import dry_run
    from argosy.train.run import TrainOptions

    path = write_spec()  # type: ignore[operator]
    lines = dry_run(resolve(path, ["parallel.dp_shard=8", "parallel.micro_batch=1"]), TrainOptions(), elsewhere=8)
    assert any("layers.0 to layers." in line for line in lines)
    assert not (tmp_path / "runs").exists()

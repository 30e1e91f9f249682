"""A checkpoint is saved under one layout and loaded under any other: the same numbers, each written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from argosy.checkpoint.manifest import verify
from argosy.config.resolve import resolve
from argosy.record.jsonl import read_metrics
from dist import checkpoints, runs
from dist.pool import Pool
from dist.training import spec_of

PAIRS = [  # one line each: model, saved under, loaded under; the first of the layouts is one process
    ("gpt", "", "dp_shard=2"),
    ("gpt", "dp_shard=2", ""),
    ("gpt", "dp_shard=4", "dp_shard=2"),
    ("gpt", "dp_replicate=2", "dp_shard=4"),
    ("llama", "dp_shard=4", "dp_replicate=2 dp_shard=2"),
    ("llama", "dp_replicate=2 dp_shard=2", "dp_replicate=2"),
    ("llama", "dp_replicate=4", ""),
    ("moe", "", "dp_replicate=2 dp_shard=2"),
    ("moe", "dp_shard=4", "dp_replicate=2"),
    ("moe", "dp_replicate=2 dp_shard=2", ""),
    ("moe", "dp_shard=2", "dp_shard=4"),
    ("mpt", "dp_replicate=2", "dp_replicate=4"),
    ("gpt", "cp=2", "dp_shard=2"),
    ("moe", "cp=2 dp_shard=2", ""),
    ("llama", "dp_shard=4", "cp=2 dp_shard=2"),
    ("gpt", "pp=2", "dp_shard=2"),
    ("gpt", "pp=2 dp_shard=2", "pp=4"),
    ("moe", "pp=2 dp_shard=2 schedule=zbv", ""),
    ("llama", "dp_replicate=2", "pp=2 dp_replicate=2"),
    ("gpt", "tp=2", "pp=2"),
    ("llama", "dp_shard=2 tp=2", ""),
    ("moe", "dp_shard=4", "dp_shard=2 tp=2"),
    ("moe", "dp_shard=2 ep=2", "tp=2"),
    ("moe", "", "dp_shard=4 ep=2"),
]


def ranks_of(model: str, layout: str) -> int:
    return spec_of(model, layout).parallel.world_size


@pytest.mark.parametrize(("model", "saved", "loaded"), PAIRS)
def test_what_one_layout_saves_another_loads(pool: Pool, tmp_path: Path, model: str, saved: str, loaded: str) -> None:
    if "pp=" not in saved + loaded:
        saved, loaded = f"{saved} model.layers=2", f"{loaded} model.layers=2"
    parts = pool.run(ranks_of(model, saved), checkpoints.train_and_save, model, saved, str(tmp_path))
    expected = {name: value for part in parts for name, value in part.items()}
    assert any(np.any(value) for name, value in expected.items() if name.startswith("optimizer/exp_avg/"))
    found = pool.run(ranks_of(model, loaded), checkpoints.load_saved, model, loaded, str(tmp_path))
    assert {name for part in found for name in part} == expected.keys()
    assert all(np.array_equal(value, expected[name]) for part in found for name, value in part.items())


@pytest.mark.parametrize("layout", ["dp_shard=4", "dp_replicate=4", "dp_replicate=2 dp_shard=2"])
def test_every_number_is_written_once_and_by_each_rank_as_many(pool: Pool, layout: str) -> None:
    shares = pool.run(ranks_of("llama", layout), checkpoints.bytes_to_write, "llama", f"{layout} model.layers=2")
    total = shares[0][1]
    assert sum(mine for mine, _ in shares) == total
    assert max(mine for mine, _ in shares) < 1.2 * total / len(shares)


def test_a_tool_that_knows_nothing_of_layouts_reads_whole_tensors(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(
        4, checkpoints.train_and_save, "moe", "dp_replicate=2 dp_shard=2 model.layers=2", str(tmp_path)
    )[0]
    found = verify(tmp_path / "step-00000001")
    weights = found.weights()
    assert {f"weights/{name}" for name in weights} == {name for name in expected if name.startswith("weights/")}
    for name, tensor in weights.items():
        assert np.array_equal(tensor.numpy(), expected[f"weights/{name}"])


@pytest.mark.parametrize("tp_dim", [0, 1])
@pytest.mark.parametrize("fsdp", [False, True])
def test_what_is_cut_twice_unevenly_is_put_together_again(pool: Pool, tmp_path: Path, tp_dim: int, fsdp: bool) -> None:
    pool.run(4, checkpoints.save_two_ways_cut, str(tmp_path), tp_dim, fsdp, False)
    weights = verify(tmp_path / "step-00000001").weights()
    assert np.array_equal(weights["cut"].numpy(), checkpoints.expected_numbers("cut"))
    assert weights["number"].item() == 7


def test_stages_save_their_own_and_a_tied_weight_once(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, checkpoints.save_two_ways_cut, str(tmp_path), 0, False, True)
    found = verify(tmp_path / "step-00000001")
    assert sum(file.bytes for name, file in found.files.items() if name.startswith("weights")) < 3 * 35 * 4 + 2000
    for name in ("tied", "stage0", "stage1"):
        assert np.array_equal(found.weights()[name].numpy(), checkpoints.expected_numbers(name))


FAMILIES = ["dp_replicate=2", "dp_shard=2", "dp_replicate=2 dp_shard=2", "cp=2", "tp=2", "pp=2"]


# What is saved in the loop itself, and loaded, is compared for every layout above: here one is enough.
@pytest.mark.parametrize(("layout", "mode"), [*((layout, "async") for layout in FAMILIES), ("dp_shard=2", "sync")])
def test_resumed_twice_in_a_row_is_bit_equal(
    pool: Pool, write_spec: Callable[..., Path], tmp_path: Path, layout: str, mode: str
) -> None:
    path = write_spec(optim={"lr": 1e-3, "schedule": "constant"}, eval="off", checkpoint={"every": 1, "mode": mode})
    keys = [*(f"parallel.{key}" for key in layout.split()), "parallel.micro_batch=2"]
    ranks = resolve(path, keys).spec.parallel.world_size
    pool.run(ranks, runs.train, str(path), [*keys, "name=once", "train.steps=3"])
    for steps in (1, 2, 3):
        pool.run(ranks, runs.train, str(path), [*keys, f"train.steps={steps}"])
    once, often = tmp_path / "runs" / "once", tmp_path / "runs" / "tiny"
    numbers = [
        {s: (r["loss"], r["grad_norm"]) for s, r in read_metrics(run / "metrics.jsonl").items()}
        for run in (once, often)
    ]
    assert numbers[0] == numbers[1]
    assert list(numbers[0]) == [1, 2, 3]
    ends = [verify(run / "checkpoints" / "step-00000003") for run in (once, often)]
    for one, other in zip(*[(end.weights(), end.optimizer()) for end in ends], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)

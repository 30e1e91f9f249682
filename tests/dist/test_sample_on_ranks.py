"""`argosy sample --nproc`: ranks that share a model write the tokens of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from argosy.cli.arguments import layout_keys
from argosy.config.resolve import resolve
from argosy.errors import ArgosyError
from argosy.infer.generate import sample_batch
from argosy.model.decoding import Sampling
from argosy.supervise.world import World
from argosy.train.run import TrainOptions, train
from dist.devices import own_mesh
from dist.pool import Pool

PROMPTS = ["once", "The end of it"]
# Greedy, and drawn.
WAYS = [Sampling(12, 0.0, 0), Sampling(12, 1.0, 0, seed=3, top_p=0.9)]


def write_as_rank(run: str, layout: list[str]) -> list[list[str]]:
    rank = World(dist.get_rank(), dist.get_rank(), dist.get_world_size())
    with patch("argosy.infer.rank_loading.joined", lambda parallel, *_: nullcontext(own_mesh(parallel))):
        return [sample_batch(run, PROMPTS, way, "cpu", layout=layout, world=rank) for way in WAYS]


def test_ranks_write_the_tokens_of_one_process(
    pool: Pool, write_spec: Callable[..., Path], tmp_path: Path, argosy: Callable[..., Any]
) -> None:
    path, run = write_spec(eval="off"), str(tmp_path / "runs" / "tiny")
    train(resolve(path, ["train.steps=2", "train.precision=fp32", "optim.warmup=0"]), path, TrainOptions(quiet=True))
    expected = [sample_batch(run, PROMPTS, way, "cpu") for way in WAYS]
    # Tensor parallelism, the default, has a key/value cache; a pipeline reads the whole texts for every token.
    for layout in ([], ["dp_shard=2"], ["pp=2"]):
        assert pool.run(2, write_as_rank, run, layout) == [expected] * 2
    given = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    keys = ("--tokens", 12, "--temperature", 0, "--device", "cpu", "--json")
    shown = argosy("sample", run, *given, *keys, "--nproc", 2, "--layout", "tp=2")
    assert shown.returncode == 0, shown.stderr
    assert [json.loads(line)["text"] for line in shown.stdout.splitlines()] == expected[0]
    # Replicas would only write the same again.
    with pytest.raises(ArgosyError, match=r"there are 4 \(--nproc\)"):
        sample_batch(run, PROMPTS, WAYS[0], "cpu", layout=["tp=2"], world=World(size=4))
    with pytest.raises(ArgosyError, match="this is one process"):
        layout_keys("tp=2", None)

"""What ranks of a pool do with whole runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from argosy.config.resolve import resolve
from argosy.config.schema import ParallelSpec
from argosy.data.loader import Loader
from argosy.data.open import open_data
from argosy.model.kv_cache import CachedTexts
from argosy.model.layers import Attention, Embedding
from argosy.model.objective import Output
from argosy.parallel.mesh import Mesh, make_mesh
from argosy.parallel.replicas import odd_replicas
from argosy.supervise.world import World
from argosy.tasks.task_registry import task_of
from argosy.train import run as runs
from argosy.train.loop import fresh_weights
from argosy.train.session import open_session
from argosy.train.step import evaluate
from argosy.train.task_scores import TaskEvaluation
from dist.devices import own_mesh, own_place


def read_batches(path: str, overrides: Sequence[str], count: int) -> list[list[list[int]]]:
    """The samples of this rank's first batches."""
    spec = resolve(Path(path), overrides).spec
    mesh = own_mesh(spec.parallel)
    stream = open_data(spec).training()
    options = {"batches": spec.train.batches, "consumed_samples": 0, "rank": mesh.data_rank, "ranks": mesh.data_ranks}
    with Loader(stream, **options) as loader:
        return [loader.next_batch().tokens.tolist() for _ in range(count)]


@contextmanager
def _joined(parallel: ParallelSpec, world: World, device: torch.device) -> Iterator[Mesh]:
    yield make_mesh(parallel, device)  # the pool has made the process group


def train(path: str, overrides: Sequence[str]) -> int:
    rank = dist.get_rank()
    world = World(rank, own_place(rank), dist.get_world_size(), source="the pool")
    with patch.object(runs, "joined", _joined):
        return runs.train(resolve(Path(path), overrides), Path(path), runs.TrainOptions(quiet=True), world)


def train_with_failing_passes(path: str, overrides: Sequence[str], where: str) -> int:
    """Train while, on the second rank, each forward pass of tasks fails at the named place."""
    owner, name = {
        "block": (Attention, "forward"), "embedding": (Embedding, "forward"), "head": (Output, "logits"),
        "inputs": (CachedTexts, "_tensor"),
    }[where]  # fmt: skip
    score = TaskEvaluation.run

    def fails(*inputs: object, **named: object) -> None:
        raise RuntimeError("out of memory")

    def score_failing(*inputs: Any) -> list[str]:
        with patch.object(owner, name, fails) if dist.get_rank() == 1 else nullcontext():
            return score(*inputs)

    with patch.object(TaskEvaluation, "run", score_failing):
        return train(path, overrides)


def validate(path: str, overrides: Sequence[str], samples: int, batch: int) -> dict[str, float]:
    """Return loss and metrics of fresh weights on as many samples as asked for."""
    spec = resolve(Path(path), overrides).spec
    session = open_session(spec, own_mesh(spec.parallel))
    session.optimizer.set_weights(fresh_weights(session, None, []))
    assert session.validation is not None
    task = task_of(spec)
    found = evaluate(session.engine, session.validation, task, samples=samples, batch=batch, split="validation")
    return {"loss": found.loss, **found.metrics}


def odd_replicas_with_a_flip(rank: int | None) -> list[int]:
    """What the ranks find when one of them has another lowest bit in one weight."""
    torch.manual_seed(0)
    weights = [torch.randn(7, 5), torch.randn(3).bfloat16()]
    if dist.get_rank() == rank:
        weights[0].view(torch.int32)[3, 2] ^= 1
    group = dist.group.WORLD
    assert group is not None
    return odd_replicas(weights, group)

"""One optimiser step, the same for training, timing and benchmarks, whatever the layout. Nothing in it waits for the device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from argosy.data.samples.windows import Batch
from argosy.model.moe import balance_experts
from argosy.parallel.engine import Engine, Result
from argosy.record.heartbeat import Phase
from argosy.train.optimizer import Optimizer

COLLECT_EVERY = 500  # steps


class Step(NamedTuple):
    result: Result
    grad_norm: Tensor  # before clipping


def take_step(
    engine: Engine,
    optimizer: Optimizer,
    batch: Batch,
    *,
    step: int,
    lr: float,
    enter: Callable[[Phase], None] = lambda phase: None,
) -> Step:
    """Gradients of a global batch, of which `batch` is this rank's share, and the update they ask for; `step` counts from 1.
    `enter` is told of each phase."""
    enter("forward_backward")
    loss_scale = optimizer.loss_scale(batch.labels.size * engine.data_ranks)
    result = engine.forward_backward(batch, step, loss_scale)
    enter("optimizer")
    grad_norm = optimizer.step(
        tokens=result.tokens,
        lr=lr,
        loss_scale=loss_scale,
        loss_sum=result.loss_sum,
        samples=len(batch.tokens) * engine.data_ranks,
        step=step,
        norm=engine.norm,
    )
    if result.expert_load is not None:
        balance_experts(engine.model, torch.where(optimizer.skip > 0, 0, result.expert_load))  # no load moves nothing
    return Step(result, grad_norm)


class StepwiseCollection:
    """Garbage collection at chosen steps: `with StepwiseCollection() as collection:` … `collection.after(step)`.

    Python's own starts whenever enough objects were made, walks everything the program holds, and so makes single steps slow: on
    many ranks, each at another step, every step."""

    def __init__(self) -> None:
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> StepwiseCollection:
        gc.collect()
        gc.freeze()  # what exists now stays to the end of the run: no need to walk it again
        gc.disable()
        return self

    def after(self, step: int) -> None:
        if step % COLLECT_EVERY == 0:
            gc.collect()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

"""One optimiser step, the same for training, timing and benchmarks, whatever the layout. It never waits for the device.

`evaluate` computes the mean loss over a split, of each source and of all sources together: a sum over tokens, divided once.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from argosy.data.samples.order import apportion
from argosy.data.samples.windows import Batch, Stream
from argosy.model.moe import balance_experts
from argosy.parallel.engine import Engine, Result
from argosy.record.heartbeat import Phase
from argosy.tasks.task import Task
from argosy.train.optimizer import Optimizer

COLLECT_EVERY = 500  # steps


class Step(NamedTuple):
    result: Result
    # Before clipping.
    grad_norm: Tensor


def take_step(
    engine: Engine,
    optimizer: Optimizer,
    batch: Batch,
    *,
    step: int,
    lr: float,
    enter: Callable[[Phase], None] = lambda phase: None,
) -> Step:
    """Compute the gradients of a global batch and update the weights.

    Args:
        batch: this rank's share of the global batch.
        step: number of the step, from 1.
        enter: called with the name of each phase as it begins.
    """
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
        # A skipped step has a load of 0, which changes no router bias.
        balance_experts(engine.model, torch.where(optimizer.skip > 0, 0, result.expert_load))
    return Step(result, grad_norm)


class StepwiseCollection:
    """Garbage collection at chosen steps: `with StepwiseCollection() as collection:` … `collection.after(step)`.

    Python's automatic collection starts after a number of allocations and walks all objects, which makes single steps slow. On
    many ranks, each at a different step, it makes every step slow."""

    def __init__(self) -> None:
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> StepwiseCollection:
        gc.collect()
        # Objects that exist now stay to the end of the run: collections need not walk them again.
        gc.freeze()
        gc.disable()
        return self

    def after(self, step: int) -> None:
        if step % COLLECT_EVERY == 0:
            gc.collect()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()


@dataclass(frozen=True)
class Evaluation:
    split: str
    loss: float  # nats per token
    tokens: int
    samples: int
    # Each source alone, if there are several.
    sets: dict[str, Evaluation] = field(default_factory=dict)
    # Other metrics of the model, such as the accuracy on pairs.
    metrics: dict[str, float] = field(default_factory=dict)
    # Whether the loss is that of predicting tokens.
    predicts_tokens: bool = True

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss, or None if the loss is not that of predicting tokens."""
        return math.exp(min(self.loss, 700.0)) if self.predicts_tokens else None

    def describe(self) -> str:
        text = f"{self.split} loss {self.loss:.4f}"
        text += "" if self.perplexity is None else f", perplexity {self.perplexity:.2f}"
        text += "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in self.metrics.items())
        return text + (
            f" ({', '.join(f'{name} {one.loss:.4f}' for name, one in self.sets.items())})" if self.sets else ""
        )


def evaluate(
    engine: Engine, sets: Mapping[str, Stream], task: Task[Any], *, samples: int, batch: int, split: str
) -> Evaluation:
    """Evaluate `samples` samples in all, at most one pass over the split. Each set gets a share by size, at least one sample.

    The losses of each set and of the whole are each a sum over tokens, divided once."""
    sizes = np.array([stream.epoch_samples for stream in sets.values()])
    shares = np.clip(apportion(sizes / sizes.sum(), samples), 1, sizes)
    found: dict[str, Evaluation] = {}
    whole = _Sums()
    for (name, stream), share in zip(sets.items(), shares.tolist(), strict=True):
        sums = _sum_losses(engine, stream, share, batch)
        found[name] = sums.evaluation(split, share, {})
        whole.add(sums.loss, sums.tokens, sums.metrics)
    result = whole.evaluation(split, int(shares.sum()), found if len(found) > 1 else {})
    return replace(result, predicts_tokens=task.predicts_tokens)


@dataclass
class _Sums:
    loss: float = 0.0
    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, loss: float, tokens: int, metrics: Mapping[str, float]) -> None:
        self.loss, self.tokens = self.loss + loss, self.tokens + tokens
        self.metrics = {name: self.metrics.get(name, 0.0) + value for name, value in metrics.items()}

    def evaluation(self, split: str, samples: int, sets: dict[str, Evaluation]) -> Evaluation:
        metrics = {name: value / self.tokens for name, value in self.metrics.items()}
        return Evaluation(split, self.loss / self.tokens, self.tokens, samples, sets, metrics)


def _sum_losses(engine: Engine, stream: Stream, samples: int, batch: int) -> _Sums:
    sums = _Sums()
    for first in range(0, samples, batch):
        result = engine.evaluate(stream.batch(first, min(batch, samples - first)))
        sums.add(float(result.loss_sum), int(result.tokens), {name: float(m) for name, m in result.metrics.items()})
    return sums

"""The mean loss over a split, of each source and of all: a sum over tokens, divided once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from argosy.data.open import open_data
from argosy.data.samples.order import apportion
from argosy.data.samples.windows import SampleStream
from argosy.errors import ArgosyError
from argosy.parallel.single import SingleDevice
from argosy.train.session import load_run, make_engine


@dataclass(frozen=True)
class Evaluation:
    split: str
    loss: float  # nats a token
    tokens: int
    samples: int
    sets: dict[str, Evaluation] = field(default_factory=dict)  # each source alone, where there are several

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def describe(self) -> str:
        text = f"{self.split} loss {self.loss:.4f}, perplexity {self.perplexity:.2f}"
        return text + (
            f" ({', '.join(f'{name} {one.loss:.4f}' for name, one in self.sets.items())})" if self.sets else ""
        )


def evaluate(
    engine: SingleDevice, sets: Mapping[str, SampleStream], *, samples: int, batch: int, split: str
) -> Evaluation:
    """Over `samples` samples in all, at most one pass over the split: from each set its share by size, and one at
    least. The losses of sets and whole are each a sum over tokens, divided once."""
    sizes = np.array([stream.epoch_samples for stream in sets.values()])
    shares = np.clip(apportion(sizes / sizes.sum(), samples), 1, sizes)
    found: dict[str, Evaluation] = {}
    total = 0.0
    for (name, stream), share in zip(sets.items(), shares.tolist(), strict=True):
        loss_sum, tokens = _sum_losses(engine, stream, share, batch)
        found[name] = Evaluation(split, loss_sum / tokens, tokens, share)
        total += loss_sum
    tokens = sum(one.tokens for one in found.values())
    return Evaluation(split, total / tokens, tokens, int(shares.sum()), found if len(found) > 1 else {})


def _sum_losses(engine: SingleDevice, stream: SampleStream, samples: int, batch: int) -> tuple[float, int]:
    loss_sum, tokens = 0.0, 0
    for first in range(0, samples, batch):
        result = engine.evaluate(stream.batch(first, min(batch, samples - first)))
        loss_sum += float(result.loss_sum)
        tokens += result.tokens
    return loss_sum, tokens


def evaluate_run(path: Path, *, split: str, batches: int | None, device: str | None = None) -> tuple[Evaluation, int]:
    """(the newest checkpoint of a run on one of its splits, the step of that checkpoint)"""
    loaded = load_run(path, device=device)
    sets = open_data(loaded.spec).each(split)
    batch = loaded.spec.train.global_batch
    samples = sum(stream.epoch_samples for stream in sets.values()) if batches is None else batches * batch
    if samples < 1:
        raise ArgosyError(
            "config.bad-value",
            "no batch to evaluate",
            key="--batches",
            value=batches,
            fix="--batches 1 or more, or leave it out",
        )
    engine = make_engine(loaded.spec, loaded.model, loaded.device)
    result = evaluate(engine, sets, samples=samples, batch=batch, split=split)
    return result, loaded.checkpoint.progress.step


def unigram_entropy(stream: SampleStream, vocab_size: int) -> float:
    """Nats a token of the best model that ignores context: what a trained one has to beat."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, stream.epoch_samples, 64):
        labels = stream.batch(first, min(64, stream.epoch_samples - first)).labels
        counts += np.bincount(labels[labels >= 0].ravel(), minlength=vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())

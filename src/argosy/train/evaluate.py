"""The mean loss over a split: a sum over tokens, divided once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from argosy.data.open import open_data
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

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def evaluate(engine: SingleDevice, stream: SampleStream, *, samples: int, batch: int, split: str) -> Evaluation:
    """Over the first `samples` samples of an unweighted stream's fixed order, at most one pass over the split."""
    samples = min(samples, stream.epoch_samples)
    loss_sum, tokens = 0.0, 0
    for first in range(0, samples, batch):
        result = engine.evaluate(stream.batch(first, min(batch, samples - first)))
        loss_sum += float(result.loss_sum)
        tokens += result.tokens
    return Evaluation(split, loss_sum / tokens, tokens, samples)


def evaluate_run(path: Path, *, split: str, batches: int | None, device: str | None = None) -> tuple[Evaluation, int]:
    """(the newest checkpoint of a run on one of its splits, the step of that checkpoint)"""
    loaded = load_run(path, device=device)
    stream = open_data(loaded.spec).whole(split)
    batch = loaded.spec.train.global_batch
    samples = stream.epoch_samples if batches is None else batches * batch
    if samples < 1:
        raise ArgosyError(
            "config.bad-value",
            "no batch to evaluate",
            key="--batches",
            value=batches,
            fix="--batches 1 or more, or leave it out",
        )
    engine = make_engine(loaded.spec, loaded.model, loaded.device)
    result = evaluate(engine, stream, samples=samples, batch=batch, split=split)
    return result, loaded.checkpoint.progress.step


def unigram_entropy(stream: SampleStream, vocab_size: int) -> float:
    """Nats a token of the best model that ignores context: what a trained one has to beat."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, stream.epoch_samples, 64):
        labels = stream.batch(first, min(64, stream.epoch_samples - first)).labels
        counts += np.bincount(labels[labels >= 0].ravel(), minlength=vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())

"""The mean loss over a split, of each source and of all: a sum over tokens, divided once."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.data.open import open_data
from argosy.data.samples.order import apportion
from argosy.data.samples.windows import Stream
from argosy.errors import ArgosyError
from argosy.parallel.mesh import Mesh
from argosy.parallel.single import SingleDevice
from argosy.train.session import Loaded, load_model, make_engine

# Of `data`: what a run's samples are, whichever corpus they are made from.
_OF_SAMPLES = {"seq_len", "mask_eod", "document_mask", "reset_positions", "bert", "t5", "ict"}
_LONGEST = 4096  # tokens in a sample for a model that was not trained here, unless asked for: some are for a million


@dataclass(frozen=True)
class Evaluation:
    split: str
    loss: float  # nats a token
    tokens: int
    samples: int
    sets: dict[str, Evaluation] = field(default_factory=dict)  # each source alone, where there are several
    metrics: dict[str, float] = field(default_factory=dict)  # what else the model reports, as the accuracy on pairs

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def describe(self) -> str:
        text = f"{self.split} loss {self.loss:.4f}, perplexity {self.perplexity:.2f}"
        text += "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in self.metrics.items())
        return text + (
            f" ({', '.join(f'{name} {one.loss:.4f}' for name, one in self.sets.items())})" if self.sets else ""
        )


def evaluate(engine: SingleDevice, sets: Mapping[str, Stream], *, samples: int, batch: int, split: str) -> Evaluation:
    """Over `samples` samples in all, at most one pass over the split: from each set its share by size, and one at
    least. The losses of sets and whole are each a sum over tokens, divided once."""
    sizes = np.array([stream.epoch_samples for stream in sets.values()])
    shares = np.clip(apportion(sizes / sizes.sum(), samples), 1, sizes)
    found: dict[str, Evaluation] = {}
    whole = _Sums()
    for (name, stream), share in zip(sets.items(), shares.tolist(), strict=True):
        sums = _sum_losses(engine, stream, share, batch)
        found[name] = sums.evaluation(split, share, {})
        whole.add(sums.loss, sums.tokens, sums.metrics)
    return whole.evaluation(split, int(shares.sum()), found if len(found) > 1 else {})


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


def _sum_losses(engine: SingleDevice, stream: Stream, samples: int, batch: int) -> _Sums:
    sums = _Sums()
    for first in range(0, samples, batch):
        result = engine.evaluate(stream.batch(first, min(batch, samples - first)))
        sums.add(float(result.loss_sum), int(result.tokens), {name: float(m) for name, m in result.metrics.items()})
    return sums


def evaluate_run(
    where: str,
    *,
    split: str,
    batches: int | None,
    device: str | None = None,
    data: str | None = None,
    seq_len: int | None = None,
) -> tuple[Evaluation, int]:
    """(a model on one of its run's splits, or on the whole of another corpus; the step it was trained to)"""
    if seq_len is not None and data is None:
        raise ArgosyError(
            "config.conflict",
            "a run's own splits are read in samples of its own length",
            key="--seq-len",
            value=seq_len,
            fix="leave it out, or give --data CORPUS",
        )
    loaded = load_model(where, device=device)
    spec = loaded.spec if data is None else _spec_on(loaded, data, seq_len)
    if spec is None:
        raise ArgosyError(
            "config.missing-key",
            f"{where} was not trained here, and has no data of its own",
            key="--data",
            fix="name a corpus prepared with its tokenizer: --data CORPUS",
        )
    split = split if data is None else "train"
    opened = open_data(spec)
    if opened.tokenizer is None:  # of a bare .bin/.idx pair nothing is known but that it is for this model
        opened = replace(opened, tokenizer=loaded.source.tokenizer())
    if not loaded.source.reads(opened.tokenizer):
        print(f"note: {loaded.source.misread()}", file=sys.stderr)
    sets = opened.each(split)
    batch = spec.train.global_batch
    samples = sum(stream.epoch_samples for stream in sets.values()) if batches is None else batches * batch
    if samples < 1:
        raise ArgosyError(
            "config.bad-value",
            "no batch to evaluate",
            key="--batches",
            value=batches,
            fix="--batches 1 or more, or leave it out",
        )
    engine = make_engine(spec, loaded.model, Mesh(loaded.device))
    result = evaluate(engine, sets, samples=samples, batch=batch, split=split if data is None else data)
    return result, loaded.source.step


def _spec_on(loaded: Loaded, data: str, seq_len: int | None) -> RunSpec:
    """The spec of a run that would start there, with all of a corpus as its training split, in samples made as those the
    model was trained on."""
    where, run, longest = loaded.source.where, loaded.spec, loaded.source.model.max_seq_len
    if seq_len is not None and seq_len > longest:
        raise ArgosyError(
            "config.arithmetic",
            f"samples of {seq_len:,} tokens are longer than the model's {longest:,} positions",
            key="--seq-len",
            value=seq_len,
            fix=f"--seq-len {longest} or less",
        )
    keys: dict[str, Any] = {"init_from": where, "data.train": data, "data.split": [1, 0, 0], "eval": "off"}
    keys |= {"train.steps": 1, "optim.lr": 1}
    if run is None:
        keys |= {"train.global_batch": 8, "data.seq_len": min(longest, _LONGEST)}
    else:
        keys |= {"train.global_batch": run.train.global_batch, "parallel.micro_batch": run.parallel.micro_batch}
        made = run.data.model_dump(mode="json", include=_OF_SAMPLES)
        keys |= {f"data.{key}": value for key, value in made.items() if value is not None}
    if seq_len is not None:
        keys["data.seq_len"] = seq_len
    return resolve(
        None, [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()]
    ).spec


def unigram_entropy(stream: Stream, vocab_size: int) -> float:
    """Nats a token of the best model that ignores context: what a trained one has to beat."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, stream.epoch_samples, 64):
        labels = stream.batch(first, min(64, stream.epoch_samples - first)).labels
        counts += np.bincount(labels[labels >= 0].ravel(), minlength=vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())

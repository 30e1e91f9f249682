"""`argosy eval`: the loss of a trained model on a split of its run, or on another corpus."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np

from argosy.checkpoint.source import Source
from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.data.open import open_data
from argosy.data.samples.windows import Stream
from argosy.errors import ArgosyError
from argosy.infer.loading import load_engine, open_trained
from argosy.parallel.mesh import Mesh
from argosy.tasks.task_registry import SECTIONS, task_of
from argosy.train.device import prepare_device
from argosy.train.step import Evaluation, evaluate

_log = logging.getLogger(__name__)
# The keys of `data` that define a run's samples, whatever the corpus.
_OF_SAMPLES = {"seq_len", "mask_eod", "document_mask", "reset_positions", "task", *SECTIONS}
# Longest sample by default, in tokens, for a model that was not trained here: some have a million positions.
_LONGEST = 4096


def evaluate_run(
    where: str,
    *,
    split: str,
    batches: int | None,
    device: str | None = None,
    data: str | None = None,
    seq_len: int | None = None,
) -> tuple[Evaluation, int]:
    """Evaluate a model on one of its run's splits, or on all of another corpus. Returns the result and the step it was trained
    to."""
    if seq_len is not None and data is None:
        raise ArgosyError(
            "config.conflict",
            "a run's own splits are read in samples of its own length",
            key="--seq-len",
            value=seq_len,
            fix="leave it out, or give --data CORPUS",
        )
    source = open_trained(where)
    run = source.run_spec()
    spec = run if data is None else _spec_on(source, run, data, seq_len)
    if spec is None:
        raise ArgosyError(
            "config.missing-key",
            f"{where} was not trained here, and has no data of its own",
            key="--data",
            fix="name a corpus prepared with its tokenizer: --data CORPUS",
        )
    split = split if data is None else "train"
    opened = open_data(spec)
    # A bare .bin/.idx pair has no tokenizer; assume the model's.
    if opened.tokenizer is None:
        opened = replace(opened, tokenizer=source.tokenizer())
    if not source.reads(opened.tokenizer):
        _log.info("%s", source.misread())
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
    engine = load_engine(source, spec, Mesh(prepare_device(spec.train, device)))
    result = evaluate(engine, sets, task_of(spec), samples=samples, batch=batch, split=split if data is None else data)
    return result, source.step


def _spec_on(source: Source, run: RunSpec | None, data: str, seq_len: int | None) -> RunSpec:
    """Return a spec whose training split is all of a corpus, with samples made as those that the model was trained on."""
    where, longest = source.where, source.model.max_seq_len
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
        keys |= {f"train.{key}": getattr(run.train, key) for key in ("device", "precision", "deterministic")}
        made = run.data.model_dump(mode="json", include=_OF_SAMPLES)
        keys |= {f"data.{key}": value for key, value in made.items() if value is not None}
    if seq_len is not None:
        keys["data.seq_len"] = seq_len
    return resolve(None, list(keys.items())).spec


def unigram_entropy(stream: Stream, vocab_size: int) -> float:
    """Return the loss, in nats a token, of the best model without context: a trained one must beat it."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, stream.epoch_samples, 64):
        labels = stream.batch(first, min(64, stream.epoch_samples - first)).labels
        counts += np.bincount(labels[labels >= 0].ravel(), minlength=vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())

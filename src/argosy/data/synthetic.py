"""Batches of random tokens in the shape of a model's samples: what a benchmark trains on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from argosy.config.schema import BertSpec, IctSpec, RunSpec, T5Spec
from argosy.data.samples.bert import MaskedLM
from argosy.data.samples.masks import IGNORED
from argosy.data.samples.t5 import lengths_for
from argosy.data.samples.windows import Batch


def synthetic_batch(spec: RunSpec) -> Batch:
    """Random tokens in the shape of the model's samples."""
    rng = np.random.default_rng(spec.train.seed)

    def draw(length: int) -> npt.NDArray[np.int64]:
        return rng.integers(0, spec.model.vocab_size, (spec.train.global_batch, length))

    tokens = draw(spec.data.seq_len)
    count = len(tokens)
    seen = np.ones(tokens.shape, bool)  # no padding
    if spec.model.samples == "t5":
        target = draw(target_length(spec) or 1)
        return Batch(tokens, target, {"decoder_tokens": target})
    if spec.model.samples == "ict":
        queries = draw((spec.data.ict or IctSpec()).query_len)
        inputs = {"padding_mask": seen, "query_tokens": queries, "query_padding_mask": np.ones(queries.shape, bool)}
        return Batch(tokens, np.arange(count), inputs)
    if spec.model.samples == "bert":
        pair, rate = spec.model.pair or "none", (spec.data.bert or BertSpec()).mask_rate
        task = MaskedLM(
            spec.data.seq_len, spec.model.vocab_size, cls=0, sep=1, mask=2, pad=3, pair=pair, mask_rate=rate
        )
        predicted = np.broadcast_to(np.arange(task.predictions), (count, task.predictions)).copy()
        labels = np.zeros(count, np.int64) if spec.model.judges_pairs else np.full(count, IGNORED)
        inputs = {
            "token_types": np.zeros_like(tokens),
            "padding_mask": seen,
            "predicted": predicted,
            "pair_labels": labels,
        }
        return Batch(tokens, draw(task.predictions), inputs)
    return Batch(tokens, draw(spec.data.seq_len))


def target_length(spec: RunSpec) -> int | None:
    """Tokens of the decoder's side of a sample, where there are two sides."""
    if spec.model.samples != "t5":
        return None
    t5 = spec.data.t5 or T5Spec()
    return lengths_for(spec.data.seq_len, t5.noise_density, t5.mean_span).targets

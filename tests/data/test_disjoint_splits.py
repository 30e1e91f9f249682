"""No token is in two splits, in any order, task and corpus: evaluation data was never trained on."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from argosy.config.resolve import resolve
from argosy.config.schema import DataSource, RunSpec
from argosy.data.corpus.indexed import IndexedWriter, dtype_for
from argosy.data.open import open_data
from argosy.errors import ArgosyError
from argosy.tasks.task_registry import task_of

SPLITS = ("train", "validation", "test")
# Documents of several sequences, as in sentence-split corpora, and of one. Only the index marks the end of a document.
DOCUMENTS = st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=6), min_size=6, max_size=40)
SHARES = st.sampled_from([(98.0, 2.0, 0.0), (60.0, 30.0, 10.0), (0.5, 0.5, 0.0), (1.0, 1.0, 1.0), (33.3, 33.3, 33.3)])
_SPECS: dict[str, RunSpec] = {}


def spec_of(task: str) -> RunSpec:
    """Return a spec for samples of that task; the test fills in its data."""
    if task not in _SPECS:
        keys = [
            "data.train=x",
            "data.seq_len=8",
            "train.global_batch=4",
            "train.steps=9",
            "optim.lr=1",
            "parallel.micro_batch=4",
        ]
        keys += [
            "model.vocab_size=20000",
            "model.layers=1",
            "model.hidden=16",
            "model.heads=2",
            "model.max_seq_len=64",
            "train.device=cpu",
        ]
        if task == "bert":
            ids = ", ".join(f"{role}: {10_000 + at}" for at, role in enumerate(("cls", "sep", "mask", "pad")))
            keys += ["model.family=bert", "model.pair=nsp", f"data.bert={{{ids}, mask_rate: 0.15}}"]
        elif task == "t5":
            keys += ["model.family=t5", "data.t5={sentinel: 19000, eos: 19500, pad: 19501}"]
        else:
            keys += ["model.family=gpt", f"data.order={task}"]
        _SPECS[task] = resolve(None, keys).spec
    return _SPECS[task]  # fmt: skip


def write(prefix: Path, documents: list[list[int]], first: int) -> int:
    """Write a corpus. Every token of all corpora is different, counted up from `first`."""
    writer = IndexedWriter(prefix, dtype_for(20_000))
    for lengths in documents:
        bounds = list(itertools.accumulate(lengths, initial=first))
        writer.add_document([np.arange(start, end) for start, end in itertools.pairwise(bounds)])
        first = bounds[-1]
    writer.finish()
    return first


def tokens_of(spec: RunSpec, split: str) -> set[int]:
    """Return the tokens read for training, and for evaluation in both of its ways; empty if the split has no sample."""
    data, found = open_data(spec), set()
    makers: list[Callable[[], list[Any]]] = [lambda: [data.whole(split)], lambda: list(data.each(split).values())]
    for make in [lambda: [data.training()], *makers] if split == "train" else makers:
        with contextlib.suppress(ArgosyError):
            for stream in make():
                # A token's id is its place in the corpora. BERT's samples also hold random tokens.
                for samples in stream.sets if task_of(spec).section == "bert" else []:
                    start = sum(corpus.tokens for corpus in data.corpora[: data.corpora.index(samples.corpus)])
                    for part in samples.ranges(np.arange(samples.count)):
                        found |= {1 + start + token for token in part}
                if task_of(spec).section != "bert":
                    batch = stream.batch(0, min(stream.epoch_samples, 36))
                    extra = [a for name, a in batch.inputs.items() if name.endswith("_tokens")]
                    found |= {
                        int(t)
                        for row in (batch.tokens, batch.labels, *extra)
                        for t in np.unique(row)
                        if 1 <= t < 10_000
                    }
    return found


@settings(max_examples=80, deadline=None)
@given(st.lists(DOCUMENTS, min_size=1, max_size=2), SHARES, st.sampled_from(["argosy", "megatron", "bert", "t5"]))
# 60% of the sequences are 84% of the documents.
@example([[[3]] * 20 + [[20] * 6] * 5], (60.0, 30.0, 10.0), "megatron")
def test_no_token_is_in_two_splits(
    corpora: list[list[list[int]]], shares: tuple[float, float, float], task: str
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        first, sources = 1, []
        for number, documents in enumerate(corpora):
            first = write(Path(directory) / f"{number}", documents, first)
            sources.append(DataSource(path=f"{directory}/{number}", weight=1.0))
        assert first < 10_000
        base = spec_of(task)
        spec = base.model_copy(update={"data": base.data.model_copy(update={"train": sources, "split": shares})})
        seen = {split: tokens_of(spec, split) for split in SPLITS}
        for one, other in itertools.combinations(SPLITS, 2):
            assert not seen[one] & seen[other]

"""Packed documents that do not see each other are the documents run one by one: losses and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from argosy.config.resolve import resolve, resolve_model
from argosy.data.corpus.indexed import IndexedWriter, dtype_for
from argosy.data.open import open_data
from argosy.data.samples.masks import IGNORED
from argosy.data.samples.windows import BatchMaker
from argosy.errors import ArgosyError
from argosy.model.build import build_model, initialise
from argosy.model.objective import Objective

EOD = 0
SIZES = ["layers=2", "hidden=32", "heads=4", "vocab_size=97", "max_seq_len=64", "init_std=0.2"]


def rows() -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Three rows of 48 + 1 tokens with documents of many lengths; the first ends in one, the second is one whole."""
    made = np.random.default_rng(0).integers(1, 97, (3, 49))
    for row, places in enumerate(([0, 5, 6, 30, 47], [], [11, 12, 40])):
        made[row, places] = EOD
    return made


@pytest.mark.parametrize("preset", ["gpt2", "llama2-7b", "qwen3-0.6b", "mpt-125m-alibi", "mistral-7b"])
def test_a_packed_batch_equals_its_documents_one_by_one(preset: str) -> None:
    more = {"gpt2": [], "mpt-125m-alibi": [], "qwen3-0.6b": ["kv_heads=2", "head_dim=16", "ffn=64"]}.get(
        preset, ["kv_heads=4", "ffn=64"]
    )
    spec = resolve_model(preset, [*SIZES, *more, *(["window=7"] if preset == "mistral-7b" else [])])
    model = build_model(spec)
    initialise(model, spec, seed=1)
    batch = BatchMaker(97, masked_eod=EOD, parting_eod=EOD, restarting_eod=EOD).batch(rows(), 0, str)
    inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
    packed = model(torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels), Objective(), **inputs)
    packed.total.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    alone = torch.zeros(())
    for row, labels, documents in zip(batch.tokens, batch.labels, batch.inputs["documents"], strict=True):
        for document in np.unique(documents):
            mine = documents == document
            one = model(torch.from_numpy(row[mine])[None], torch.from_numpy(labels[mine])[None], Objective())
            one.total.backward()
            alone += one.cross_entropy
    assert (batch.labels == IGNORED).sum() == 8  # one for each EOD
    torch.testing.assert_close(packed.cross_entropy, alone, rtol=1e-5, atol=0)
    for name, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(
            found[name], parameter.grad, rtol=1e-5, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_run_spec_asks_for_it(write_spec: Callable[..., Path], corpus: Path) -> None:
    both = ["data.document_mask=true", "data.reset_positions=true"]
    path = write_spec(data={"train": str(corpus), "seq_len": 700, "split": [90, 10, 0]})
    batch = open_data(resolve(path, both).spec).training().batch(0, 8)
    assert batch.inputs["documents"].max() >= 1
    ends = np.argwhere(batch.tokens[:, :-1] == 256)
    assert len(ends)
    assert (batch.inputs["positions"][ends[:, 0], ends[:, 1] + 1] == 0).all()
    assert not open_data(resolve(path).spec).training().batch(0, 8).inputs


def test_documents_without_an_end_cannot_be_told_apart(write_spec: Callable[..., Path], tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "pair", dtype_for(100))
    for _ in range(20):
        writer.add_document([np.arange(100)])
    writer.finish()
    path = write_spec(data={"train": str(tmp_path / "pair"), "seq_len": 32, "split": [90, 10, 0]})
    with pytest.raises(ArgosyError) as refusal:
        open_data(resolve(path, ["data.document_mask=true"]).spec).training()
    assert (refusal.value.code, refusal.value.key) == ("tokenizer.no-eod", "data.document_mask")

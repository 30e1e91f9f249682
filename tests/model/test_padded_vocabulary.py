"""Padding of the vocabulary changes the shape of a GEMM and nothing else: losses, gradients, logits and parameters stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from argosy.config.counts import count_parameters
from argosy.config.model import ModelSpec
from argosy.config.resolve import resolve, resolve_model
from argosy.model.build import build_model, initialise
from argosy.model.objective import Objective
from argosy.model.ops import cross_entropy
from argosy.record.jsonl import read_metrics
from argosy.train.run import TrainOptions, train

VOCAB = 131
SIZES = [
    "layers=1",
    "hidden=16",
    "heads=2",
    "ffn=24",
    f"vocab_size={VOCAB}",
    "max_seq_len=12",
    "dropout=0",
    "init_std=0.3",
]
PRESETS = {
    "gpt2": [],
    "llama3-8b": ["kv_heads=2"],
    "bert-base": [],
    "t5-small": ["decoder_layers=1", "head_dim=8"],
}


def spec_of(preset: str, tied: bool, multiple: int) -> ModelSpec:
    return resolve_model(preset, [*SIZES, *PRESETS[preset], f"tied={tied}", f"vocab_multiple={multiple}"])


def losses_of(model: nn.Module, spec: ModelSpec) -> tuple[list[Tensor], Tensor]:
    """Return the losses of three steps of gradient descent, and the logits after them."""
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(3):
        tokens, labels = torch.randint(0, VOCAB, (2, 3, 12), generator=generator)
        labels[:, ::4] = -100
        inputs = {"decoder_tokens": tokens.flip(1)} if spec.decoder_layers else {}
        model.zero_grad()
        loss = model(tokens, labels, Objective(z_loss=1e-2), **inputs)
        loss.total.backward()
        losses += [loss.total.detach(), loss.cross_entropy]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad
    with torch.no_grad():
        logits: Tensor = model(tokens, **inputs)
    return losses, logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_padded_model_computes_what_it_does_without_padding(
    preset: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several chunks of rows, the last one smaller.
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 7 * VOCAB * 4)
    found = []
    for multiple in (1, 128):
        spec = spec_of(preset, tied, multiple)
        assert spec.padded_vocab() == {1: VOCAB, 128: 256}[multiple]
        model = build_model(spec, "cpu")
        initialise(model, spec, seed=3)
        losses, logits = losses_of(model, spec)
        assert logits.shape[-1] == VOCAB
        assert sum(p.numel() for p in model.parameters()) == count_parameters(spec).total
        found.append([*losses, logits, *model.parameters()])
    for plain, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-6, atol=1e-7)


def test_additional_columns_get_no_probability_and_no_gradient() -> None:
    hidden, weight = torch.randn(5, 8), torch.randn(11, 8)
    logits = torch.nn.functional.pad(hidden @ weight.t(), (0, 117))
    labels = torch.tensor([0, 10, -100, 4, 5])
    expected = torch.nn.functional.cross_entropy(logits[:, :11], labels, reduction="none", ignore_index=-100)
    losses, _ = cross_entropy.softmax_loss_(logits, labels, 0.0, True, 11)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(logits[:, :11].sum(1), torch.zeros(5), atol=1e-6, rtol=0)
    assert not logits[:, 11:].any()


def test_a_run_may_resume_with_other_padding(write_spec: Callable[..., Path], tmp_path: Path) -> None:
    path = write_spec(
        eval="off", train={"global_batch": 8, "steps": 4}, optim={"lr": 1e-3, "schedule": "constant", "warmup": 1}
    )
    losses = {}
    for name, starts in (("one", [["train.steps=4"]]), ("two", [["model.vocab_multiple=1", "train.steps=2"], []])):
        for overrides in starts:
            assert train(resolve(path, [f"name={name}", *overrides]), path, TrainOptions(quiet=True)) == 0
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / "runs" / name / "metrics.jsonl").values()]
    assert len(losses["one"]) == 4
    # On a GPU the runs are in bf16, and matmuls of other widths add up in another order.
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-4 if torch.cuda.is_available() else 1e-6)


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"), [(50257, 1, 50304), (50257, 8, 51200), (128256, 1, 128256), (67, 2, 256)]
)
def test_rows_are_a_multiple_of_128_on_each_rank(vocab: int, tp: int, rows: int) -> None:
    spec = resolve_model("gpt2", [f"vocab_size={vocab}"])
    assert spec.padded_vocab(tp) == rows
    assert count_parameters(spec) == count_parameters(spec.model_copy(update={"vocab_multiple": 1}))

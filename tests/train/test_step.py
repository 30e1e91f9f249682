"""One step: gradients of a sum divided once, decay on matrices only."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from argosy.config.resolve import resolve_model
from argosy.config.schema import OptimSpec
from argosy.data.samples.masks import IGNORED
from argosy.data.samples.windows import Batch
from argosy.errors import ArgosyError
from argosy.model.build import build_model, initialise
from argosy.parallel.single import SingleDevice, copied
from argosy.parallel.transformer_blocks import DropoutSeeds
from argosy.train.optimizer import Optimizer, undecayed

SPEC = resolve_model("gpt2", ["layers=2", "hidden=32", "heads=4", "vocab_size=64", "max_seq_len=16"])
CPU = torch.device("cpu")


def model() -> torch.nn.Module:
    built = build_model(SPEC)
    initialise(built, SPEC, seed=1)
    return built


def uneven_batch(rows: int = 8) -> Batch:
    """Rows with very different numbers of labels that count."""
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, 64, (2, rows, 16))
    for row in range(rows):
        labels[row, : row * 2] = IGNORED
    return Batch(tokens, labels)


def optim(**changes: object) -> OptimSpec:
    return OptimSpec.model_validate({"lr": 0.01, "min_lr": 0.001} | changes)


def engine(built: torch.nn.Module, micro_batch: int) -> SingleDevice:
    return SingleDevice(built, DropoutSeeds(built, seed=1), micro_batch=micro_batch, device=CPU)


def reference_gradients(batch: Batch) -> dict[str, torch.Tensor]:
    """Of the mean over valid tokens of the whole batch, in one pass and without our step."""
    built = model()
    logits = built(torch.from_numpy(batch.tokens)).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch.labels).flatten(), ignore_index=IGNORED).backward()
    return {name: p.grad for name, p in built.named_parameters() if p.grad is not None}


def test_a_batch_copied_for_the_device_trains_alike_and_leaves_the_loader_free_to_go_on() -> None:
    rows = np.random.default_rng(1).integers(0, 64, (8, 17))
    batch = Batch(rows[:, :-1], rows[:, 1:])  # views, as samples come
    plain, moved = model(), model()
    expected = engine(plain, 4).forward_backward(batch, 1)
    copy = copied(batch, pinned=False)
    rows[:] = 0
    assert all(tensor.is_contiguous() for tensor in copy.tensors.values())
    found = engine(moved, 4).forward_backward(copy, 1)
    assert (float(found.loss_sum), found.tokens) == (float(expected.loss_sum), expected.tokens)
    for one, other in zip(plain.parameters(), moved.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert engine(plain, 4).place(batch) is batch  # a processor reads any memory


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_accumulation_weighs_every_token_alike(micro_batch: int) -> None:
    batch = uneven_batch()
    built = model()
    result = engine(built, micro_batch).forward_backward(batch, step=1)
    assert result.tokens == batch.valid_tokens < batch.labels.size
    for name, expected in reference_gradients(batch).items():
        found = dict(built.named_parameters())[name].grad
        torch.testing.assert_close(found / result.tokens, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
def test_the_update_is_torchs_adamw_on_mean_gradients_clipped(clip: float | None) -> None:
    batch = uneven_batch()
    built = model()
    result = engine(built, 4).forward_backward(batch, step=1)
    norm = Optimizer(built, optim(clip=clip, weight_decay=0.1, eps=1e-2)).step(tokens=result.tokens, lr=0.003)

    expected = model()
    gradients = reference_gradients(batch)
    for name, parameter in expected.named_parameters():
        parameter.grad = gradients[name]
    total = torch.nn.utils.clip_grad_norm_(expected.parameters(), clip if clip is not None else math.inf)
    groups = [
        {"params": [p for p in expected.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in expected.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=0.003, betas=(0.9, 0.95), eps=1e-2).step()
    assert float(norm) == pytest.approx(float(total), rel=1e-5)
    for (name, found), wanted in zip(built.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_are_cleared_after_a_step() -> None:
    built = model()
    result = engine(built, 8).forward_backward(uneven_batch(), step=1)
    Optimizer(built, optim()).step(tokens=result.tokens, lr=0.01)
    assert all(p.grad is None for p in built.parameters())


def test_biases_and_norms_do_not_decay_and_patterns_add_to_them() -> None:
    found = undecayed(model(), ["embed.*"])
    assert {"layers.0.attn_norm.weight", "layers.1.mlp.up.bias", "norm.weight"} <= found
    assert {"embed.tokens.weight", "embed.positions.weight"} <= found
    assert "layers.0.attn.qkv.weight" not in found


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ArgosyError) as refusal:
        Optimizer(model(), OptimSpec(lr=1.0, min_lr=0.1, no_decay=["embd.*"]))
    assert refusal.value.key == "optim.no_decay"
    assert "did you mean embed.*" in refusal.value.fix


def test_dropout_depends_on_the_step_not_on_the_process() -> None:
    spec = resolve_model("gpt2", ["layers=2", "hidden=32", "heads=4", "vocab_size=64", "max_seq_len=16", "dropout=0.3"])
    built = build_model(spec)
    initialise(built, spec, seed=1)
    losses = []
    for step, noise in ((5, 0), (5, 7), (6, 0)):
        torch.rand(noise)
        losses.append(float(engine(built, 4).forward_backward(uneven_batch(), step).loss_sum))
    assert losses[0] == losses[1] != losses[2]


def test_evaluation_uses_no_dropout_and_leaves_training_mode_on() -> None:
    spec = resolve_model("gpt2", ["layers=2", "hidden=32", "heads=4", "vocab_size=64", "max_seq_len=16", "dropout=0.5"])
    built = build_model(spec)
    initialise(built, spec, seed=1)
    found = [float(engine(built, 4).evaluate(uneven_batch()).loss_sum) for _ in range(2)]
    assert found[0] == found[1]
    assert built.training

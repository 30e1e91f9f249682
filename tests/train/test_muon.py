"""Muon: torch's own on a matrix, query, key and value apart, experts one by one, AdamW for the rest; and factors on the
learning rate by pattern."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from argosy import compat
from argosy.config.optimizers.muon import MuonSpec
from argosy.config.resolve import resolve, resolve_model
from argosy.config.schema import OptimSpec
from argosy.errors import ArgosyError
from argosy.model.build import build_model, initial_weights
from argosy.parallel.precision import apply_precision
from argosy.train.muon_update import Heads, heads_of, muon, orthogonalise
from argosy.train.optimizer import Optimizer, hidden_matrices, lr_factors
from argosy.train.run import TrainOptions, train
from argosy.train.slots import Slot, Update
from train.cut_runs import require_bit_equal_resume

Write = Callable[..., Path]
SIZES = ["layers=2", "hidden=32", "heads=4", "vocab_size=64", "max_seq_len=16"]
LLAMA = resolve_model("llama3-8b", [*SIZES, "kv_heads=2", "ffn=64"])


def run(
    start: torch.Tensor, gradients: list[torch.Tensor], spec: MuonSpec, heads: dict[str, Heads] | None = None
) -> torch.Tensor:
    parameter = nn.Parameter(start.clone())
    slot = Slot("w", parameter, parameter.detach(), {"momentum": torch.zeros_like(start)})
    apply = muon(spec, heads or {})
    for number, gradient in enumerate(gradients, start=1):
        update = Update(0.02, torch.tensor(1.0), torch.tensor(0.0), torch.tensor(float(number)))
        with torch.no_grad():
            apply([slot], [gradient], update, 0.1)
    return parameter.detach()


def gradients(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n in range(3)]


def test_iterations_are_in_fp32_on_a_cpu_without_kernels_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    [matrix, *_] = gradients(8, 16)
    found = {}
    for support in ("native", "emulated", "missing"):
        monkeypatch.setattr(compat, "cpu_matmul_support", lambda _, support=support: support)
        found[support] = orthogonalise(matrix, 5)
    assert [x.dtype for x in found.values()] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert torch.allclose(found["missing"], found["native"].float(), atol=0.05)


@pytest.mark.parametrize("shape", [(32, 32), (16, 48), (48, 16)])
@pytest.mark.parametrize("lr_scaling", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_matrix_is_updated_as_torchs_muon_does(shape: tuple[int, int], lr_scaling: str, nesterov: bool) -> None:
    start = torch.randn(shape)
    found = run(start, gradients(*shape), MuonSpec.model_validate({"lr_scaling": lr_scaling, "nesterov": nesterov}))
    expected = nn.Parameter(start.clone())
    reference = torch.optim.Muon([expected], lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=lr_scaling)
    for gradient in gradients(*shape):
        expected.grad = gradient
        reference.step()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-2, atol=1e-3)
    assert (found - expected).norm() < 2e-3 * expected.norm()


def test_singular_values_come_near_one() -> None:
    for shape in ((32, 64), (3, 64, 32)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape) * 1e-3, 5).float())
        assert values.min() > 0.4
        assert values.max() < 1.4


def test_experts_are_matrices_of_their_own() -> None:
    stack = gradients(4, 16, 32)
    together = run(torch.zeros(4, 16, 32), stack, MuonSpec())
    for expert in range(4):
        alone = run(torch.zeros(16, 32), [gradient[expert] for gradient in stack], MuonSpec())
        torch.testing.assert_close(together[expert], alone, rtol=0.02, atol=1e-4)


def test_query_key_and_value_are_orthogonalised_apart() -> None:
    """Rows are 2 key/value heads of (2 queries, key, value), 4 wide."""
    gradient = torch.randn(2 * 4 * 4, 16)
    moved = run(torch.zeros(32, 16), [gradient], MuonSpec(), {"w": Heads((2, 1, 1), 4)}).unflatten(0, (2, 4, 4))
    slots = gradient.unflatten(0, (2, 4, 4))
    for rows, shape in ((slice(0, 2), (16, 16)), (slice(2, 3), (8, 16)), (slice(3, 4), (8, 16))):
        part = slots[:, rows].flatten(0, 2)
        assert part.shape == shape
        torch.testing.assert_close(
            moved[:, rows].flatten(0, 2), run(torch.zeros(shape), [part], MuonSpec()), rtol=0.02, atol=1e-4
        )


def test_hidden_matrices_are_muons_and_the_rest_adamws() -> None:
    built = build_model(LLAMA)
    optimizer = Optimizer(built, OptimSpec.model_validate({"name": "muon", "lr": 0.01, "min_lr": 0.001}))
    names = optimizer.tensors().keys()
    by_muon = {name.removeprefix("momentum/") for name in names if name.startswith("momentum/")}
    by_adamw = {name.removeprefix("exp_avg/") for name in names if name.startswith("exp_avg/")}
    assert by_muon | by_adamw == {name for name, _ in built.named_parameters()}
    assert not by_muon & by_adamw
    assert {"embed.tokens.weight", "head.weight", "norm.weight", "layers.0.attn_norm.weight"} <= by_adamw
    assert by_muon == {
        f"layers.{i}.{part}.weight"
        for i in (0, 1)
        for part in ("attn.qkv", "attn.out", "mlp.gate", "mlp.up", "mlp.down")
    }
    assert heads_of(built)["layers.0.attn.qkv.weight"] == Heads((2, 1, 1), 8)


def test_every_family_has_matrices_and_embeddings_are_never_among_them() -> None:
    for preset in ("gpt2", "mpt-1b-alibi", "bert-base", "t5-base"):
        built = build_model(resolve_model(preset, ["layers=1"]), "meta")
        names = hidden_matrices(built)
        assert heads_of(built).keys() <= names
        assert not {name for name in names if "embed" in name or "relative" in name or "norm" in name}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_skipped_or_low_precision_step_keeps_master_and_parameter_in_step(precision: str) -> None:
    built = build_model(LLAMA)
    apply_precision(built, precision)
    optimizer = Optimizer(built, OptimSpec.model_validate({"name": "muon", "lr": 0.01, "min_lr": 0.001}))
    optimizer.set_weights(initial_weights(built, LLAMA, 1))
    for poison in (0.0, float("inf")):
        before = {name: t.clone() for name, t in (optimizer.weights() | optimizer.tensors()).items()}
        for parameter in built.parameters():
            parameter.grad = torch.randn_like(parameter) + poison
        if poison and precision == "bf16":
            continue
        optimizer.step(tokens=1, lr=0.01)
        same = [torch.equal(t, before[name]) for name, t in (optimizer.weights() | optimizer.tensors()).items()]
        assert all(same) if poison else not any(same)
        for name, parameter in built.named_parameters():
            assert torch.equal(parameter, optimizer.weights()[name].to(parameter.dtype))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_is_bit_equal(write_spec: Write, tmp_path: Path, precision: str) -> None:
    require_bit_equal_resume(
        write_spec, tmp_path / "runs", {"name": "muon", "lr": 1e-2, "schedule": "constant"}, precision
    )


def test_one_optimiser_cannot_go_on_from_anothers_state(write_spec: Write) -> None:
    path = write_spec()
    train(resolve(path), path, TrainOptions(quiet=True))
    with pytest.raises(ArgosyError, match=r"optim\.name: was 'adamw', now 'muon'"):
        train(resolve(path, ["optim.name=muon", "train.steps=9"]), path, TrainOptions(quiet=True))


def test_keys_for_muon_without_muon_are_refused(write_spec: Write) -> None:
    with pytest.raises(ArgosyError) as refusal:
        resolve(write_spec(), ["optim.muon={momentum: 0.9}"])
    assert refusal.value.key == "optim.muon"


def test_learning_rates_are_scaled_by_pattern_and_the_first_match_counts(write_spec: Write) -> None:
    built = build_model(LLAMA)
    factors = lr_factors(built, {"embed.*": 0.1, "*.weight": 0.5})
    assert factors["embed.tokens.weight"] == 0.1
    assert factors["head.weight"] == 0.5
    with pytest.raises(ArgosyError) as refusal:
        Optimizer(built, OptimSpec(lr=1.0, min_lr=0.1, lr_scale={"embd.*": 0.1}))
    assert refusal.value.key == "optim.lr_scale"
    spec = resolve(write_spec(), ["optim.lr_scale={embed.*: 0.1, norm.weight: 2}"]).spec.optim
    assert spec.lr_scale == {"embed.*": 0.1, "norm.weight": 2.0}
    moved = {}
    for scale in ({}, {"embed.*": 0.1}):
        built = build_model(LLAMA)
        optimizer = Optimizer(
            built, OptimSpec.model_validate({"lr": 0.01, "min_lr": 0.001, "weight_decay": 0, "lr_scale": scale})
        )
        optimizer.set_weights(initial_weights(built, LLAMA, 1))
        start = {name: p.detach().clone() for name, p in built.named_parameters()}
        for parameter in built.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(tokens=1, lr=0.01)
        moved[len(scale)] = {name: (p - start[name]).detach() for name, p in built.named_parameters()}
    torch.testing.assert_close(
        moved[1]["embed.tokens.weight"], 0.1 * moved[0]["embed.tokens.weight"], rtol=1e-3, atol=1e-7
    )
    assert torch.equal(moved[1]["head.weight"], moved[0]["head.weight"])

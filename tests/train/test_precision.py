"""Precisions: parameters in the training precision, 32-bit masters that alone are saved, gradients that add up in 32 bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from argosy import compat
from argosy.checkpoint.store import latest
from argosy.config.resolve import resolve, resolve_model
from argosy.config.schema import OptimSpec
from argosy.data.samples.windows import Batch
from argosy.errors import ArgosyError
from argosy.infer.evaluate_run import evaluate_run
from argosy.infer.generate import sample
from argosy.infer.loading import load_model
from argosy.measure.dry_run import dry_run
from argosy.model.build import build_model, initial_value, initial_weights, initialise
from argosy.model.decoding import Sampling
from argosy.model.ops import fp8
from argosy.model.ops.choice import kernels
from argosy.parallel import precision as precision_module
from argosy.parallel import single
from argosy.parallel.precision import (
    DTYPES,
    apply_precision,
    choose_precision,
    describe_precision,
    evaluation_precision,
    slow_precision,
)  # fmt: skip
from argosy.parallel.single import SingleDevice
from argosy.parallel.transformer_blocks import DropoutSeeds
from argosy.record.jsonl import read_jsonl, read_metrics
from argosy.train.optimizer import Optimizer
from argosy.train.run import TrainOptions, train

Write = Callable[..., Path]
SPEC = resolve_model("gpt2", ["layers=2", "hidden=32", "heads=2", "vocab_size=64", "max_seq_len=16"])
OPTIM = OptimSpec.model_validate({"lr": 0.01, "min_lr": 0.001})
CPU = torch.device("cpu")
LOW = [precision for precision in DTYPES if precision != "fp32"]
# Without instructions for it, a CPU takes 40 to 400 times as long for a matmul in 16 bits. What a run of a few tokens shows, more would not.
SMALL = ("data.seq_len=16", "train.global_batch=4", "parallel.micro_batch=2", "optim.warmup=0")
EIGHT_BIT = (*SMALL, "model.ffn=64")  # sizes are multiples of 16


def model(precision: str) -> tuple[nn.Module, Optimizer]:
    built = build_model(SPEC)
    apply_precision(built, precision)
    optimizer = Optimizer(built, OPTIM)
    optimizer.set_weights(initial_weights(built, SPEC, 1))
    return built, optimizer


def batch(rows: int = 8) -> Batch:
    tokens, labels = np.random.default_rng(0).integers(0, 64, (2, rows, 16))
    return Batch(tokens, labels)


def engine(built: nn.Module, micro_batch: int = 4) -> SingleDevice:
    return SingleDevice(built, DropoutSeeds(built, seed=1), micro_batch=micro_batch, device=CPU)


def go(path: Path, *overrides: str) -> Path:
    resolved = resolve(path, overrides)
    assert train(resolved, path, TrainOptions(quiet=True)) == 0
    return Path(resolved.spec.runs_dir) / resolved.spec.name


def outcome(run: Path) -> tuple[dict[int, tuple[float, float]], str]:
    """(loss and gradient norm of each step; hash of the newest weights and optimiser)"""
    found = latest(run / "checkpoints", print)
    assert found is not None
    files = [found.path / name for name in ("weights.safetensors", "optimizer.safetensors")]
    metrics = {step: (r["loss"], r["grad_norm"]) for step, r in read_metrics(run / "metrics.jsonl").items()}
    return metrics, hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def test_auto_is_32_bit_on_a_cpu_and_16_bit_on_a_gpu() -> None:
    assert choose_precision("auto", CPU) == "fp32"
    assert choose_precision("auto", torch.device("cuda")) == "bf16"
    assert choose_precision("fp8", CPU) == "fp8"


@pytest.mark.parametrize("precision", LOW)
def test_masters_hold_every_bit_of_the_initial_weights_and_parameters_their_rounding(precision: str) -> None:
    built, optimizer = model(precision)
    for name, parameter in built.named_parameters():
        exact = initial_value(name, parameter.shape, SPEC, 1)
        assert torch.equal(optimizer.weights()[name], exact)
        assert parameter.dtype == DTYPES[precision]
        assert torch.equal(parameter, exact.to(DTYPES[precision]))


def test_a_32_bit_parameter_is_its_own_master() -> None:
    built, optimizer = model("fp32")
    for name, parameter in built.named_parameters():
        assert optimizer.weights()[name].data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize("precision", LOW)
def test_updates_too_small_for_the_parameter_add_up_in_its_master(precision: str) -> None:
    built, optimizer = model(precision)
    name, parameter = "norm.weight", built.norm.weight
    for _ in range(20):  # each far below half a step of a 16-bit 1.0
        engine(built, 1).forward_backward(batch(1), step=1)
        optimizer.step(tokens=16, lr=1e-5)
    moved = (optimizer.weights()[name] - 1).abs()
    assert moved.median() > 1e-4
    assert torch.equal(parameter, optimizer.weights()[name].to(parameter.dtype))


@pytest.mark.parametrize("precision", LOW)
def test_loss_and_gradients_are_those_of_32_bits_but_for_rounding(precision: str) -> None:
    wide, low = (model(p)[0] for p in ("fp32", precision))
    losses = [engine(m).forward_backward(batch(), step=1).loss_sum for m in (wide, low)]
    assert losses[1].dtype == torch.float64, "sums over micro-batches"
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=2e-3)
    for (name, a), b in zip(wide.named_parameters(), low.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        difference = (b.grad.float() - a.grad).norm() / a.grad.norm()
        assert difference < (0.15 if precision == "fp8" else 0.03), name


def test_one_micro_batch_leaves_gradients_in_the_parameters_precision_and_several_add_up_in_32_bits() -> None:
    built, optimizer = model("bf16")
    for micro_batch, dtype in ((8, torch.bfloat16), (2, torch.float32), (8, torch.bfloat16)):
        engine(built, micro_batch).forward_backward(batch(), step=1)
        assert {p.grad.dtype for p in built.parameters() if p.grad is not None} == {dtype}
        optimizer.step(tokens=8 * 16, lr=0.0)


def test_accumulated_gradients_are_the_32_bit_sum_of_the_micro_batches() -> None:
    whole = batch(8)
    together, _ = model("bf16")
    engine(together, 1).forward_backward(whole, step=1)
    expected = [torch.zeros(p.shape) for p in together.parameters()]
    for row in range(8):
        alone, _ = model("bf16")
        engine(alone, 1).forward_backward(Batch(whole.tokens[row : row + 1], whole.labels[row : row + 1]), step=1)
        for total, parameter in zip(expected, alone.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad
    for total, (name, parameter) in zip(expected, together.named_parameters(), strict=True):
        assert parameter.grad is not None
        if (
            name == "embed.tokens.weight"
        ):  # the head's part is added to it in 32 bits, or in 16 where there is one micro-batch
            torch.testing.assert_close(parameter.grad, total, rtol=0.01, atol=0.01)
        else:
            assert torch.equal(parameter.grad, total), name


def test_fp8_is_for_the_layers_and_the_head_where_the_sizes_allow_it() -> None:
    built, _ = model("fp8")
    eight_bit = {name for name, module in built.named_modules() if getattr(module, "fp8", False)}
    assert eight_bit == {
        *(f"layers.{i}.{part}" for i in (0, 1) for part in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")),
        "predict",
    }
    odd = build_model(resolve_model("gpt2", ["layers=1", "hidden=32", "heads=2", "ffn=40", "vocab_size=64"]))
    apply_precision(odd, "fp8")
    assert not odd.layers["0"].mlp.up.fp8
    assert odd.layers["0"].attn.qkv.fp8


def test_fp8_is_refused_where_no_layer_can_have_it_and_the_run_says_how_many_have() -> None:
    narrow = build_model(resolve_model("gpt2", ["layers=1", "hidden=40", "heads=2", "ffn=24", "vocab_size=64"]))
    with pytest.raises(
        ArgosyError, match="multiples of 16, and no linear layer in the blocks has that: their sizes are 24, 40, 120"
    ):
        apply_precision(narrow, "fp8")
    half = build_model(resolve_model("gpt2", ["layers=1", "hidden=32", "heads=2", "ffn=40", "vocab_size=64"]))
    apply_precision(half, "fp8")
    described = "fp8 (2 of the 4 linear layers in the blocks, and the backward pass of the output head)"
    assert describe_precision(half, "fp8") == described
    assert describe_precision(half, "bf16") == "bf16"


def test_fp8_refuses_a_number_of_tokens_the_hardware_cannot_multiply(write_spec: Write) -> None:
    data = {"train": "x", "seq_len": 28}
    shared = ["parallel.cp=2", "parallel.micro_batch=2"]
    with pytest.raises(ArgosyError, match="micro_batch 2 x seq_len 8 / cp 2 = 8") as refused:
        resolve(
            write_spec(data=data | {"seq_len": 8}, train={"global_batch": 8, "steps": 9, "precision": "fp8"}), shared
        )
    assert refused.value.fix == "parallel.micro_batch=4 or a multiple of it, or a data.seq_len that is a multiple of 32"
    with pytest.raises(ArgosyError, match="micro_batch 1 x seq_len 28 = 28"):
        resolve(
            write_spec(data=data, train={"global_batch": 8, "steps": 9, "precision": "fp8"}), ["parallel.micro_batch=1"]
        )
    resolve(
        write_spec(data=data, train={"global_batch": 8, "steps": 9, "precision": "fp8"}), ["parallel.micro_batch=4"]
    )


@pytest.mark.parametrize("precision", ["fp32", *LOW])
def test_a_resumed_run_is_bit_equal(write_spec: Write, precision: str) -> None:
    path = write_spec(optim={"lr": 1e-3, "schedule": "constant"}, eval=False)
    common = (f"train.precision={precision}", *EIGHT_BIT, "train.steps=4")
    expected = outcome(go(path, "name=whole", *common))
    go(path, "name=cut", *common, "train.steps=3")
    assert outcome(go(path, "name=cut", *common)) == expected


def test_weights_are_rounded_once_for_all_micro_batches_of_a_step(
    write_spec: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where blocks are recomputed, and with the bits of weights that are rounded for each micro-batch."""
    common = ("train.precision=fp8", *EIGHT_BIT, "train.steps=3", "eval=off")
    path = write_spec(optim={"lr": 1e-3, "schedule": "constant"})
    rounded: list[tuple[int, ...]] = []
    compute = fp8._quantise
    monkeypatch.setattr(fp8, "_quantise", lambda x, *others: rounded.append(tuple(x[0].shape)) or compute(x, *others))
    outcomes, counts = [], []
    for how in ("selective", "none", "each"):
        rounded.clear()
        if how == "each":
            monkeypatch.setattr(single, "weights_rounded_once", nullcontext)
        outcomes.append(
            outcome(go(path, f"name={how}", *common, f"parallel.recompute={how if how != 'each' else 'none'}"))
        )
        counts.append(rounded.count((64, 32)))  # of the up projection's weight, and of nothing else
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert counts[0] == counts[1] == counts[2] // 2 > 0


def test_evaluation_and_sampling_use_the_runs_precision_and_weights_are_saved_in_32_bits(
    write_spec: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "cpu_matmul_support", lambda _: "native")
    run = go(write_spec(), "train.precision=bf16", *SMALL)
    found = latest(run / "checkpoints", print)
    assert found is not None
    assert {tensor.dtype for tensor in found.weights().values()} == {torch.float32}
    logged = read_metrics(run / "metrics.jsonl")[6]["validation_loss"]
    assert evaluate_run(str(run), split="validation", batches=2)[0].loss == logged
    assert sample(str(run), "ab", Sampling(tokens=4)).startswith("ab")


def test_a_run_in_8_bit_products_is_evaluated_on_devices_that_have_none(
    write_spec: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "cpu_matmul_support", lambda _: "native")
    run = go(write_spec(), "train.precision=fp8", *EIGHT_BIT)
    logged = read_metrics(run / "metrics.jsonl")[6]["validation_loss"]

    def refuse(*_: object) -> None:
        raise AssertionError("fp8 matmuls are asked for")

    monkeypatch.setattr(precision_module, "apply_fp8", refuse)
    assert evaluate_run(str(run), split="validation", batches=2)[0].loss == logged


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(("support", "told"), [("missing", "matmul, more for larger"), ("emulated", "emulates")])
def test_a_precision_the_cpu_has_no_instructions_for_is_told_with_the_fix(
    precision: str, support: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "cpu_matmul_support", lambda _: support)
    warning = slow_precision(precision, CPU)
    assert warning is not None
    assert told in warning
    assert warning.startswith(f"{precision} on this CPU")
    assert "train.precision=fp32" in warning
    assert slow_precision("auto", CPU) is slow_precision("fp32", CPU) is None
    assert evaluation_precision(precision, CPU) == "fp32" or support == "emulated"
    monkeypatch.setattr(compat, "cpu_matmul_support", lambda _: "native")
    assert slow_precision(precision, CPU) is None


def test_a_cpu_without_16_bit_floats_warns_when_it_trains_and_evaluates_in_fp32(
    write_spec: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(compat, "cpu_matmul_support", lambda _: "missing")
    caplog.set_level("INFO", "argosy")
    path = write_spec()
    assert any(
        "train.precision=fp32" in line for line in dry_run(resolve(path, ["train.precision=bf16"]), TrainOptions())
    )
    resolved = resolve(path, ["train.precision=bf16", *SMALL, "train.steps=2"])
    assert train(resolved, path, TrainOptions()) == 0
    assert "warning: bf16 on this CPU" in capsys.readouterr().out
    run = Path(resolved.spec.runs_dir) / resolved.spec.name
    assert load_model(str(run)).model.embed.tokens.weight.dtype == torch.float32
    assert "trained in bf16, computed in fp32" in caplog.text
    monkeypatch.setattr(compat, "cpu_matmul_support", lambda _: "native")
    go(path, "train.precision=bf16", *SMALL, "train.steps=3")
    events = list(read_jsonl(run / "events.jsonl"))
    assert [event["event"] for event in events if event["event"] == "precision"] == ["precision"]
    [resumed] = [event for event in events if event["event"] == "resume"]
    assert "machine.precision: bf16 (missing in this CPU) -> bf16" in resumed["changes"]
    assert load_model(str(run)).model.embed.tokens.weight.dtype == torch.bfloat16


def test_a_run_from_before_precision_was_recorded_has_not_changed_it(write_spec: Write) -> None:
    run = go(write_spec(), "train.steps=4")
    stored = json.loads((run / "resolved.json").read_text())
    assert stored["machine"].pop("precision") == "fp32"
    (run / "resolved.json").write_text(json.dumps(stored))
    go(write_spec())
    [resumed] = [event for event in read_jsonl(run / "events.jsonl") if event["event"] == "resume"]
    assert not [change for change in resumed["changes"] if change.startswith("machine.")]


def test_precision_may_change_when_a_run_goes_on(write_spec: Write) -> None:
    go(write_spec(), "train.precision=bf16", *SMALL, "train.steps=2")
    run = go(write_spec(), "train.precision=fp32", *SMALL, "train.steps=3")
    assert max(read_metrics(run / "metrics.jsonl")) == 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_kernel_updates_as_torchs_fused_adamw_does(precision: str) -> None:
    results = []
    for form in (False, True):
        built, optimizer = model(precision)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for parameter in built.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            with kernels(form):
                optimizer.step(tokens=8 * 16, lr=0.003)
        results.append((built, optimizer))
    (_, plain), (built, fused) = results
    for name, value in fused.tensors().items():
        torch.testing.assert_close(value, plain.tensors()[name], rtol=1e-5, atol=1e-9)
    for name, parameter in built.named_parameters():
        torch.testing.assert_close(fused.weights()[name], plain.weights()[name], rtol=1e-5, atol=1e-7)
        # the interpreter cuts bits off where the hardware rounds
        torch.testing.assert_close(parameter, fused.weights()[name].to(parameter.dtype), rtol=2**-7, atol=0)


def test_plain_initialisation_fills_a_model_in_its_own_precision() -> None:
    built = build_model(SPEC)
    apply_precision(built, "bf16")
    initialise(built, SPEC, 1)
    assert torch.equal(built.embed.tokens.weight, model("bf16")[0].embed.tokens.weight)


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt"},
    "qwen3": {"family": "llama", "kv_heads": 2, "qk_norm": True},
    "mistral": {"family": "llama", "window": 8},
    "mpt": {"family": "mpt"},
    "moe": {"family": "llama", "moe": {"experts": 4, "top_k": 2, "ffn": 32}},
    "bert": {"family": "bert"},
    "t5": {"family": "t5"},
}
TASKS = {
    "bert": {"bert": {"cls": 257, "sep": 258, "mask": 259, "pad": 260}},
    "t5": {"t5": {"sentinel": 299, "sentinels": 30, "eos": 257, "pad": 258}},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_in_every_precision_and_gets_about_the_same_losses(
    write_spec: Write, corpus: Path, family: str
) -> None:
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "ffn": 64, "vocab_size": 300}
    data = {"train": str(corpus), "seq_len": 32, "split": [90, 10, 0]} | TASKS.get(family, {})
    # In 8 bits T5 takes multiples of 16 samples.
    rows = 16 if family == "t5" else 4
    train_keys = {"global_batch": rows, "steps": 3}
    path = write_spec(
        model=FAMILIES[family] | sizes,
        data=data,
        train=train_keys,
        parallel={"micro_batch": rows},
        eval={"every": 3, "batches": 1},
    )
    found = {}
    for precision in DTYPES:
        run = go(path, f"name={precision}", f"train.precision={precision}")
        found[precision] = read_metrics(run / "metrics.jsonl")
    for precision, metrics in found.items():
        for step, record in metrics.items():
            expected = found["fp32"][step]
            assert record["loss"] == pytest.approx(expected["loss"], rel=0.01), (precision, step)
            assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.2), (precision, step)
        assert metrics[3]["validation_loss"] == pytest.approx(found["fp32"][3]["validation_loss"], rel=0.01)

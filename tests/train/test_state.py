"""What is planned of a parameter's state is what training keeps of it and what a checkpoint holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint.manifest import TrainProgress
from argosy.checkpoint.save import save
from argosy.config.counts import checkpoint_bytes
from argosy.config.model import ModelSpec
from argosy.config.optimizers import RULES
from argosy.config.resolve import resolve_model
from argosy.config.schema import OptimSpec
from argosy.model.build import build_model
from argosy.parallel.precision import apply_precision
from argosy.plan.calibration import calibration
from argosy.plan.layouts import Layout, Work
from argosy.plan.memory import stage_memory
from argosy.train.optimizer import Optimizer

TINY: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocab_size": 96, "max_seq_len": 16}
MOE = {"experts": 4, "top_k": 2, "ffn": 48}
MODELS = {
    "untied": {"family": "llama", "kv_heads": 2},
    "tied": {"family": "gpt"},
    "experts": {"family": "llama", "moe": MOE},
    "fixed-biases": {"family": "llama", "moe": MOE | {"bias_rate": 0.001, "shared_experts": 1, "dense_layers": 1}},
    "encoder": {"family": "bert"},
    "encoder-decoder": {"family": "t5"},
}


def tensor_bytes(directory: Path) -> int:
    """Of all tensors in a checkpoint's files, without their headers."""
    total = 0
    for file in directory.glob("*.safetensors"):
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        json.loads(content[8 : 8 + length])
        total += len(content) - 8 - length
    return total


@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_as_large_as_planned(name: str, precision: str, optimizer: str, tmp_path: Path) -> None:
    spec = resolve_model(TINY | MODELS[name])
    model = build_model(spec, torch.device("cpu"))
    apply_precision(model, precision)
    state = Optimizer(model, OptimSpec(lr=1e-3, min_lr=1e-4, name=optimizer))
    saved = save(tmp_path, TrainProgress(1, 8), state.weights(), state.tensors())
    assert tensor_bytes(saved) == checkpoint_bytes(spec, RULES[optimizer])


def test_state_in_16_bits_is_held_and_counted_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = replace(RULES["adamw"], state={"exp_avg": "bf16", "exp_avg_sq": "fp32"})
    monkeypatch.setitem(RULES, rule.name, rule)
    spec = resolve_model(TINY | MODELS["untied"])
    state = Optimizer(build_model(spec, torch.device("cpu")), OptimSpec(lr=1e-3, min_lr=1e-4))
    saved = save(tmp_path, TrainProgress(1, 8), state.weights(), state.tensors())
    assert {t.dtype for name, t in state.tensors().items() if name.startswith("exp_avg/")} == {torch.bfloat16}
    assert tensor_bytes(saved) == checkpoint_bytes(spec, rule)


def planned(model: ModelSpec, optimizer: str, precision: str, layout: Layout) -> tuple[float, float]:
    """GiB of weights and optimiser on one rank."""
    known = calibration()
    work = Work(model, 16, 8, precision, rule=RULES[optimizer])
    memory = stage_memory(work, layout, known.stacks["argosy"], known, 0)
    return memory.weights, memory.optimiser


@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_weights_and_optimiser_are_planned_as_a_rank_holds_them(precision: str, optimizer: str) -> None:
    from argosy.measure.rehearsal import hold, rehearse
    from argosy.parallel.mesh import Mesh

    spec = run_spec(precision, optimizer)
    one = hold(spec, Mesh(torch.device("meta")))
    weights, state = planned(spec.model, optimizer, precision, Layout())
    assert weights * 2**30 == pytest.approx(one.parameter_bytes, rel=1e-3)
    assert state * 2**30 == pytest.approx(one.optimizer_bytes, rel=1e-3)
    sharded = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"dp_shard": 4, "micro_batch": 2})})
    (part,) = rehearse(sharded, 4)  # each holds a quarter in 32 bits, which are the masters too
    weights, state = planned(spec.model, optimizer, precision, Layout(dp=4, zero=3, micro_batch=2))
    assert weights * 2**30 == pytest.approx(part.parameter_bytes, rel=1e-3)
    assert state * 2**30 == pytest.approx(part.optimizer_bytes, rel=1e-3)


def run_spec(precision: str, optimizer: str) -> Any:
    from argosy.config.schema import RunSpec

    return RunSpec.model_validate({
        "model": resolve_model(TINY | MODELS["untied"] | {"hidden": 64, "vocab_size": 256}).model_dump(),
        "data": {"train": [{"path": "synthetic"}], "seq_len": 16},
        "train": {"global_batch": 8, "steps": 1, "precision": precision},
        "optim": {"name": optimizer, "lr": 1e-3, "min_lr": 1e-4},
        "parallel": {"micro_batch": 8},
    })  # fmt: skip

"""With fp8, training multiplies the gradients of the output head in 8 bits. Everything else about the head stays in 16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from argosy.config.resolve import resolve, resolve_model
from argosy.model.build import build_model, initialise
from argosy.model.layers import Linear
from argosy.model.ops import fp8_cross_entropy
from argosy.parallel.mesh import Mesh
from argosy.parallel.parallelize import parallelize
from argosy.parallel.precision import apply_precision, describe_precision
from argosy.parallel.tensor.region import Region
from argosy.parallel.tensor.vocabulary import SpreadOutput

SIZES = ["layers=1", "hidden=32", "heads=2", "ffn=32", "vocab_size=67", "dropout=0"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of a head with 8-bit matmuls."""
    found: list[int] = []
    compute = fp8_cross_entropy.fp8_head_loss

    def counted(*arguments: Any) -> Any:
        found.append(len(arguments[0]))
        return compute(*arguments)

    monkeypatch.setattr(fp8_cross_entropy, "fp8_head_loss", counted)
    return found


@pytest.mark.parametrize("preset", ["gpt2", "bert-base", "t5-small"])
def test_the_head_multiplies_8_bits_in_training_alone(preset: str, calls: list[int]) -> None:
    """Its loss is then that of 16 bits."""
    spec = resolve_model(preset, SIZES)
    model = build_model(spec, "cpu")
    initialise(model, spec, 1)
    apply_precision(model, "fp8")
    assert model.predict.fp8
    for module in model.modules():
        if isinstance(module, Linear):
            module.fp8 = False
    torch.manual_seed(3)
    tokens, labels = torch.randint(0, 67, (2, 2, 16))
    others = {"decoder_tokens": tokens} if preset == "t5-small" else {}
    model.train()
    trained = model(tokens, labels, **others)
    assert calls == [32]
    model.eval()
    evaluated = model(tokens, labels, **others)
    model.train()
    with torch.no_grad():
        model(tokens, labels, **others)
        model(tokens, **others)
    apply_precision(model, "fp8", fp8_head=False)
    model(tokens, labels, **others)
    assert calls == [32]
    assert torch.equal(trained.cross_entropy, evaluated.cross_entropy)


def test_a_head_of_another_width_stays_in_16_bits_and_the_run_says_so() -> None:
    sizes = ["layers=1", "hidden=24", "heads=2", "head_dim=16", "ffn=32", "vocab_size=64"]
    model = build_model(resolve_model("llama3-1b", [*sizes, "kv_heads=2"]))
    # One that has 8-bit layers all the same.
    model.layers["1"] = build_model(resolve_model("gpt2", SIZES)).layers["0"]
    apply_precision(model, "fp8")
    assert not model.predict.fp8
    assert describe_precision(model, "fp8") == "fp8 (4 of the 9 linear layers in the blocks)"


def test_a_sharded_head_is_as_the_one_it_replaces() -> None:
    spec = resolve_model("gpt2", SIZES)
    region = Region(SimpleNamespace(size=lambda: 2, rank=lambda: 1), sequence=True)  # type: ignore[arg-type]
    for fp8 in (False, True):
        assert SpreadOutput(spec, region, alike=False, fp8=fp8).rounds == fp8


def test_the_head_of_pairs_of_answers_stays_in_16_bits(write_spec: Callable[..., Path]) -> None:
    keys = ["train.precision=fp8", "data.seq_len=16", "parallel.micro_batch=2", "model.ffn=64"]
    for task, eight_bit in (("causal-lm", True), ("dpo", False)):
        spec = resolve(write_spec(), [*keys, f"data.task={task}"]).spec
        model = parallelize(spec, Mesh(torch.device("meta"))).model
        assert model.predict.fp8 == eight_bit
        assert ("output head" in describe_precision(model, "fp8")) == eight_bit
